import assert from "node:assert/strict"
import { test } from "node:test"
import * as scale from "../../../web/scale.js"

test("headroom is the doublings left under the fp16 maximum", () => {
  assert.equal(scale.headroomBits(65504), 0)
  assert.equal(scale.headroomBits(65504 / 16), 4)
  assert.ok(Math.abs(scale.headroomBits(131008) + 1) < 1e-12)
  assert.equal(scale.headroomBits(Infinity), -Infinity)
  for (const nothing of [0, -1, null, undefined, NaN, "5"]) assert.equal(scale.headroomBits(nothing), null)
})

test("the worst level wins", () => {
  assert.equal(scale.worstLevel(["ok", "not_finite", "low"]), "not_finite")
  assert.equal(scale.worstLevel([]), "none")
})

test("the axis always holds the fp16 maximum, and every peak", () => {
  for (const peaks of [[], [0], [null, Infinity], [3], [0.001, 5], [1e-30], [1e30], [65504, 2 ** 19.5]]) {
    const { low, high, ticks } = scale.axis(peaks)
    assert.ok(low <= 0 && high >= scale.FP16_MAX_LOG2, `${peaks}`)
    assert.ok(ticks.length >= 3 && ticks.length <= 24 && ticks.every((t) => t >= low && t <= high), `${peaks}`)
    for (const peak of peaks) {
      if (peak > 2 ** -24 && peak < 2 ** 128) assert.ok(Math.log2(peak) >= low && Math.log2(peak) <= high)
    }
  }
})

test("project maps linearly and holds to the ends", () => {
  assert.equal(scale.project(5, 0, 10, 100, 0), 50)
  assert.equal(scale.project(99, 0, 10, 100, 0), 0)
  assert.equal(scale.project(-1, 0, 10, 100, 0), 100)
  assert.equal(scale.project(1, 3, 3, 7, 9), 7)
})

test("bands fill the width, in order, with a gap between text and joint blocks", () => {
  for (const groups of [[2, 42], [0, 4], [3, 0], [0, 200]]) {
    const places = scale.bands(groups, 300)
    assert.equal(places.length, groups[0] + groups[1])
    places.forEach((p, i) => assert.ok(i === 0 || p.x >= places[i - 1].x + places[i - 1].width - 1e-9))
    assert.ok(Math.abs(places.at(-1).x + places.at(-1).width - 300) < 1e-6)
  }
  assert.deepEqual(scale.bands([0, 0], 300), [])
  assert.deepEqual(scale.bands([2, 2], 0), [])
  const [, second, third] = scale.bands([2, 2], 100)
  assert.ok(third.x - (second.x + second.width) > 1)
})

test("the band under the pointer, or the nearest", () => {
  const places = scale.bands([2, 42], 300)
  places.forEach((p, i) => assert.equal(scale.bandAt(places, p.x + p.width / 2), i))
  assert.equal(scale.bandAt(places, -50), 0)
  assert.equal(scale.bandAt(places, 9999), 43)
  assert.equal(scale.bandAt([], 3), -1)
})
