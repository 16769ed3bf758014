import assert from "node:assert/strict"
import { test } from "node:test"
import * as format from "../../../web/format.js"

const table = (fn, rows) => rows.forEach(([value, text]) => assert.equal(fn(value), text))

test("peaks at a glance", () => {
  table(format.peak, [
    [31234, "31\u202f234"], [15008.3, "15\u202f008"], [3.4e38, "3.4e38"], [3904, "3904"], [812.4, "812"], [12.34, "12"], [0.5, "0.5"],
    [0.0123, "0.012"], [0.00001, "1.0e-5"], [0, "0"], [Infinity, "∞"], [NaN, "–"], [null, "–"], ["<b>", "–"],
  ])
})

test("peaks in full have fp32's digits and no more", () => {
  table(format.exact, [[31234.567890123, "31\u202f234.57"], [65504, "65\u202f504"], [3.4e38, "3.4e+38"], [0, "0"], [Infinity, "∞"], [undefined, "–"]])
})

test("headroom in bits", () => {
  table(format.bits, [
    [4.0703, "4.1"], [1.079, "1.1"], [0.96, "0.96"], [0.079, "0.08"], [0.0007, "0.0007"], [0, "0.00"],
    [-1.5, "−1.5"], [-0.1, "−0.10"], [-Infinity, "−∞"], [null, "–"],
  ])
})

test("thousands stand apart from five digits on", () => {
  table(format.grouped, [[0, "0"], [4096, "4096"], [296960, "296\u202f960"], [1234567, "1\u202f234\u202f567"], [12345.6789, "12\u202f345.6789"]])
})

test("counts shorten", () => {
  table(format.count, [[0, "0"], [9999, "9999"], [12345, "12k"], [1.25e6, "1.2M"], [3e12, "3T"], [1e20, "100000P"], [NaN, "–"]])
})

test("factors are fractions where they are powers of two", () => {
  table(format.factor, [[0.0625, "1/16"], [1, "1"], [2, "2"], [0.3, "0.3"], [2 ** -20, "1/1048576"], [NaN, "?"]])
  table(format.factors, [[[0.0625], "1/16"], [[0.5, 0.5], "1/2"], [[1 / 64, 1 / 16], "1/64…1/16"], [0.25, "1/4"], [[], "?"], [[null], "?"]])
})

test("powers of two are written with superscripts", () => {
  table(format.powerOfTwo, [[0, "2⁰"], [12, "2¹²"], [-4, "2⁻⁴"]])
})

test("the axis has plain numbers as far as they are short", () => {
  table(format.tick, [[0, "1"], [4, "16"], [12, "4096"], [16, "65536"], [20, "2²⁰"], [-4, "2⁻⁴"]])
})
