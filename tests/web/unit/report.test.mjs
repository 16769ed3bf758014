import assert from "node:assert/strict"
import { test } from "node:test"
import { ENGLISH, Texts } from "../../../web/i18n.js"
import { MAX_BLOCKS, nearest, normalise, text, textBlocks } from "../../../web/report.js"
import * as words from "../../../web/words.js"
import { block, report } from "./reports.mjs"

const { t } = new Texts()
const shown = (raw) => normalise(raw).report
const view = (rest) => ({ phase: "done", notes: [], cached: false, error: null, report: null, ...rest })

test("a good report comes through", () => {
  const { report: r, refusal, notes } = normalise(report())
  assert.equal(refusal, null)
  assert.deepEqual(notes, [])
  assert.equal(r.peak.name, "layer.1")
  assert.equal(r.level, "ok")
  assert.equal(textBlocks(r.blocks), 2)
  assert.equal(words.headline(r, t), "layer.1 peaks 3900 · 4.1 bits of headroom")
  assert.equal(words.action(r, t), "Folded online with c 1/16.")
  assert.deepEqual(words.setup(r), ["online", "native", "fp16", "c 1/16"])
})

test("what is no report is refused in words", () => {
  const cases = [
    [null, "refused.notObject"], [7, "refused.notObject"], ["<b>", "refused.notObject"], [[], "refused.notObject"],
    [{}, "refused.notReport"], [{ schema: "other/1" }, "refused.notReport"],
    [{ schema: "moss_fp16.report/1" }, "refused.noBlocks"],
    [{ schema: "moss_fp16.report/2", data: 1 }, "refused.newer"],
  ]
  for (const [raw, refusal] of cases) {
    assert.deepEqual(normalise(raw), { report: null, refusal, notes: [] })
    assert.ok(ENGLISH[refusal])
  }
})

test("a newer schema with blocks is shown and says so", () => {
  const { report: r, notes } = normalise(report({ schema: "moss_fp16.report/2", mode: { new: true } }))
  assert.deepEqual(notes, ["note.newer"])
  assert.equal(r.mode, "?")
  assert.equal(r.peak.name, "layer.1")
})

test("NaN, Infinity and null peaks read as overflow, missing ones as unknown", () => {
  for (const bad of [NaN, Infinity, -Infinity, null, "NaN", "Infinity", "-inf"]) {
    const r = shown(report({ blocks: [block("layer.0", 12), block("layer.1", bad)] }))
    assert.equal(r.level, "over", String(bad))
    assert.equal(words.headline(r, t), "layer.1 overflowed: values that are not finite")
  }
  const r = shown(report({ blocks: [{ name: "layer.0" }, { name: "layer.1", max_abs: {} }] }))
  assert.equal(r.level, "none")
  assert.equal(words.headline(r, t), "No peaks were measured")
})

test("0, 200 and too many blocks", () => {
  assert.equal(words.verdict(shown(report({ blocks: [] }))), "none")
  assert.equal(words.headline(shown(report({ blocks: [] })), t), "")
  const many = (n) => Array.from({ length: n }, (_, i) => block(`layer.${i}`, i + 1))
  assert.equal(shown(report({ blocks: many(200) })).peak.name, "layer.199")
  const { report: r, notes } = normalise(report({ blocks: many(5000) }))
  assert.equal(r.blocks.length, MAX_BLOCKS)
  assert.deepEqual(notes, ["note.truncated"])
})

test("nothing of any shape throws", () => {
  const junk = [undefined, null, NaN, Infinity, -1, 1e300, "", "<img src=x>", "x".repeat(5000), true, [], [[]], {}, () => 1, Symbol.iterator]
  const fields = Object.keys(report())
  for (const value of junk) {
    for (const field of fields) check(report({ [field]: value }))
    check(report({ blocks: [value, block("layer.0", 1)] }))
    check(report({ rescues: [value], warnings: [value], factors: { c: [value], s_attn: value, baked: value, clamp: value } }))
    for (const field of Object.keys(block("a", 1))) check(report({ blocks: [block("layer.0", 5, { [field]: value })] }))
  }
  function check(raw) {
    const { report: r } = normalise(raw)
    if (!r) return
    for (const say of [words.headline, words.action]) assert.equal(typeof say(r, t), "string")
    words.setup(r)
    words.counts(r)
    words.verdict(r)
    words.remarks(view({ report: r }), t)
    words.state(view({ report: r, phase: "running" }), t)
    for (const b of r.blocks) words.blockLines(b, r.limited, t).forEach((line) => assert.equal(typeof line, "string"))
  }
})

test("the nearest block is the largest peak; of several that overflowed, the first", () => {
  const of = (...blocks) => nearest(shown(report({ blocks })).blocks)?.name
  assert.equal(of(block("a", 5), block("b", 9), block("c", 9)), "b")
  assert.equal(of(block("a", null, { non_finite: 2 }), block("b", null, { non_finite: 3 })), "a")
  assert.equal(of(), undefined)
})

test("several blocks that overflowed are counted", () => {
  const r = shown(report({ blocks: [block("layer.0", 5), block("layer.1", null), block("layer.2", null), block("layer.3", null)] }))
  assert.equal(words.headline(r, t), "layer.1 and 2 more overflowed: values that are not finite")
})

test("what was done about it", () => {
  const say = (rest) => words.action(shown(report(rest)), t)
  const rescue = { step: 4, sigma: 0.5, rung: "c 1/32", reason: "layer.22 saturated" }
  assert.equal(say({ rescues: [rescue] }), "Rescued at step 4 with c 1/32 (layer.22 saturated)")
  assert.equal(say({ rescues: [rescue, { ...rescue, step: 9 }] }), "Rescued 2 times, last at step 9 with c 1/32 (layer.22 saturated)")
  assert.equal(words.verdict(shown(report({ rescues: [rescue] }))), "rescued")
  assert.equal(say({ mode: "none" }), "No fix was applied.")
  assert.equal(say({ mode: "fp32_residual", blocks: [block("layer.0", 9, { clamped: 12345 })] }), "12k values were clamped. The stream is kept in fp32.")
  assert.equal(say({ mode: "weights", factors: { c: [1], s_attn: [1], s_ffn: [1], baked: { c: [0.0625] } } }), "The weights carry the fold: c 1/16.")
})

test("a stream in fp32 is judged as one", () => {
  const r = shown(report({ stream_dtype: "fp32", mode: "fp32_residual", blocks: [block("layer.0", 131008, { saturated: 5 })] }))
  assert.equal(r.level, "wide")
  assert.equal(words.headline(r, t), "layer.0 peaks 1.3e5 · stream is fp32, 1.0 bits above the fp16 maximum")
  assert.equal(words.counts(r)[0].bad, false)
})

test("states in words", () => {
  const r = shown(report({ step: 3, total_steps: 8 }))
  const say = (rest) => words.state(view({ report: r, ...rest }), t)
  assert.equal(say({ phase: "running" }), "step 3 of 8")
  assert.equal(say({ phase: "done" }), "done, 8 steps")
  assert.equal(say({ phase: "done", cached: true }), "from cache: report of an earlier run")
  assert.equal(say({ phase: "failed" }), "failed at step 3 of 8")
  assert.equal(say({ phase: "interrupted" }), "interrupted at step 3 of 8")
  assert.equal(say({ phase: "idle", report: null }), "idle")
})

test("remarks: warnings, and a failed self-check that has no warning of its own", () => {
  const say = (rest) => words.remarks(view({ report: shown(report(rest)) }), t)
  const failed = { result: "failed", detail: "layers.0 of another pack" }
  assert.deepEqual(say({ self_check: { result: "passed", detail: null } }), [])
  assert.deepEqual(say({ self_check: { result: "remembered" } }), [])
  assert.deepEqual(say({ self_check: failed }), ["Self-check: failed layers.0 of another pack"])
  assert.deepEqual(say({ self_check: failed, warnings: ["said"] }), ["said"])
})

test("text from outside is one bounded line", () => {
  assert.equal(text("a\n\tb  c"), "a b c")
  assert.equal(text("x".repeat(900)).length, 400)
  assert.equal(text({}, "?"), "?")
  assert.equal(text("<script>"), "<script>") // shown as it is: the page sets text nodes
})
