import assert from "node:assert/strict"
import { test } from "node:test"
import { ENGLISH, Texts } from "../../../web/i18n.js"
import { MAX_BLOCKS, OUTCOMES, nearest, normalise, text, textBlocks } from "../../../web/report.js"
import { LEVELS } from "../../../web/scale.js"
import { countColumns } from "../../../web/table.js"
import * as words from "../../../web/words.js"
import { block, message, remedy, report } from "./reports.mjs"

const texts = new Texts()
const { t } = texts
const shown = (raw) => normalise(raw).report
const view = (rest) => ({ phase: "done", notes: [], cached: false, error: null, report: null, ...rest })
const headline = (rest, more = {}) => words.headline(view({ report: shown(report(rest)), ...more }), texts)
const broken = (...names) => names.map((name) => block(name, null, { non_finite: 3 }))
const THIN = "\u202f"

test("a good report comes through", () => {
  const { report: r, refusal, notes } = normalise(report())
  assert.equal(refusal, null)
  assert.deepEqual(notes, [])
  assert.equal(r.peak.name, "layer.1")
  assert.deepEqual([r.level, r.outcome], ["ok", "ok"])
  assert.equal(textBlocks(r.blocks), 2)
  assert.equal(headline({}), "Image not affected by fp16")
  assert.equal(words.fact(r, t), "largest value 3900 in layer.1 · margin 4.1 bits")
  assert.equal(words.action(r, t), "Fix active: stream scaled by 1/16.")
  assert.deepEqual(words.setup(r, t), ["fix online", "engine native", "fp16", "c 1/16"])
  assert.deepEqual(words.counts(r, t).map((c) => c.text), ["no value saturated, none NaN/inf"])
})

test("the levels and the outcome are the server's; what it does not say is not made up", () => {
  const levels = (level) => shown(report({ blocks: [block("layer.0", 70000, { level })] })).blocks[0].level
  for (const level of LEVELS) assert.equal(levels(level), level)
  for (const odd of [undefined, null, "over", 3, {}]) assert.equal(levels(odd), "none")
  for (const outcome of OUTCOMES) assert.equal(shown(report({ outcome })).outcome, outcome)
  for (const odd of [undefined, null, "fine", 3]) assert.equal(shown(report({ outcome: odd })).outcome, "unknown")
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

test("NaN, Infinity and null peaks are drawn as overflow, missing ones are not drawn", () => {
  for (const bad of [NaN, Infinity, -Infinity, null, "NaN", "Infinity", "-inf"]) {
    const r = shown(report({ blocks: [block("layer.0", 12), block("layer.1", bad)] }))
    assert.equal(r.blocks[1].maxAbs, Infinity, String(bad))
    assert.equal(words.fact(r, t), "NaN or infinity in layer.1")
  }
  const r = shown(report({ blocks: [{ name: "layer.0" }, { name: "layer.1", max_abs: {} }] }))
  assert.equal(r.level, "none")
  assert.equal(words.fact(r, t), "No largest values were measured")
})

test("0, 200 and too many blocks", () => {
  assert.equal(words.fact(shown(report({ blocks: [] })), t), "")
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
    check(report({ rescues: [value], messages: [value], warnings: [value], factors: { c: [value], s_attn: value, baked: value, clamp: value } }))
    check(report({ outcome: "broken", messages: [message("x", { key: value, values: { a: value, b: [value] } })], remedy: remedy({ action: value, values: value }) }))
    check(report({ outcome: "broken", verdict: { values: { cause: value } } }))
    for (const field of Object.keys(block("a", 1))) check(report({ blocks: [block("layer.0", 5, { [field]: value })] }))
  }
  const loop = message("round")
  loop.values = { loop }
  check(report({ messages: [loop] }))
  function check(raw) {
    const { report: r } = normalise(raw)
    if (!r) return
    for (const say of [words.fact, words.action]) assert.equal(typeof say(r, t), "string")
    words.setup(r, t)
    words.counts(r, t)
    for (const phase of ["running", "done", "failed", "interrupted"]) {
      const at = view({ report: r, phase })
      assert.equal(typeof words.headline(at, texts), "string")
      words.verdict(at)
      words.state(at, t)
    }
    words.remarks(view({ report: r }), texts).forEach((line) => assert.equal(typeof line.text, "string"))
    for (const b of r.blocks) words.blockLines(b, r, t).forEach((line) => assert.equal(typeof line, "string"))
  }
})

test("the nearest block is the largest peak; of several that overflowed, the first", () => {
  const of = (...blocks) => nearest(shown(report({ blocks })).blocks)?.name
  assert.equal(of(block("a", 5), block("b", 9), block("c", 9)), "b")
  assert.equal(of(...broken("a", "b")), "a")
  assert.equal(of(), undefined)
})

test("the first line says what became of the image", () => {
  const rescue = { step: 4, sigma: 0.5, rung: "c 1/32", reason: "layer.22 saturated" }
  const cause = (words) => ({ key: "verdict_broken", values: { cause: message(words) }, text: "" })
  assert.equal(headline({ outcome: "broken" }), "Image is black or broken: the model left fp16's range")
  assert.equal(headline({ outcome: "broken", verdict: cause("the model was given NaN") }), "Image is black or broken: the model was given NaN")
  assert.equal(
    headline({ outcome: "broken", messages: [message("", { key: "some_images_broken" })] }),
    "Images of the batch are broken: the model left fp16's range",
  )
  assert.equal(headline({ outcome: "broken" }, { phase: "running" }), "Image will be black or broken: the model left fp16's range")
  assert.equal(headline({ outcome: "saturated" }), "Image may be wrong: values hit fp16's limit")
  assert.equal(headline({ outcome: "unknown", blocks: [] }), "Nothing was counted")
  const small = message("Lost bits.", { key: "small_factor", severity: "warn" })
  assert.equal(headline({ outcome: "unknown", messages: [small] }), "Image may be wrong: with so small a factor fp16 loses bits")
  assert.equal(headline({ outcome: "rescued", rescues: [rescue] }), "Image is fine: step 4 was computed again with c 1/32")
  assert.equal(headline({ outcome: "rescued", rescues: [rescue, rescue] }), "Image is fine: 2 steps were computed again, the last with c 1/32")
  assert.equal(headline({}, { phase: "running" }), "In range so far")
  const zeros = { blocks: [block("layer.0", 0)] }
  assert.equal(headline(zeros, { phase: "running" }), "The numbers come when the run ends")
  assert.equal(headline(zeros), "Image not affected by fp16")
})

test("why a run failed is its first line", () => {
  const error = message("out of memory", { key: "" })
  assert.equal(headline({}, { phase: "failed", error }), "The run failed: out of memory")
  assert.equal(headline({}, { phase: "failed", error, errorNode: "VAE Decode" }), "VAE Decode failed: out of memory")
  assert.equal(headline({}, { phase: "failed" }), "The run failed")
  assert.equal(words.verdict(view({ phase: "failed" })), "failed")
  assert.equal(words.verdict(view({ phase: "interrupted", report: shown(report()) })), "interrupted")
})

test("the number behind it", () => {
  const say = (rest) => words.fact(shown(report(rest)), t)
  assert.equal(say({ blocks: [block("layer.5", 15008)] }), `largest value 15${THIN}008 in layer.5 · margin 2.1 bits (small)`)
  assert.equal(say({ blocks: [block("layer.5", 65504, { saturated: 2 })] }), "layer.5 reached fp16's limit of 65504")
  assert.equal(say({ blocks: broken("a", "b", "c") }), "NaN or infinity in a, b, c")
  assert.equal(say({ blocks: broken("a", "b", "c", "d", "e") }), "NaN or infinity in a, b, c and 2 more")
  const wide = (peak) => say({ stream_dtype: "fp32", blocks: [block("layer.0", peak, { level: "ok" })] })
  assert.equal(wide(131008), `largest value 131${THIN}008 in layer.0 · beyond fp16, but the stream is fp32`)
  assert.equal(wide(100), "largest value 100 in layer.0 · the stream is fp32, so 65504 is no limit")
})

test("whether a fix is at work", () => {
  const say = (rest) => words.action(shown(report(rest)), t)
  assert.equal(say({ mode: "none" }), "No fix is active.")
  assert.equal(
    say({ mode: "fp32_residual", blocks: [block("layer.0", 9, { clamped: 12345 })] }),
    `12${THIN}345 values were clamped. Fix active: the stream is kept in fp32.`,
  )
  assert.equal(
    say({ mode: "weights", factors: { c: [1], s_attn: [1], s_ffn: [1], baked: { c: [0.0625] } } }),
    "Fix active: the weights carry it, stream scaled by 1/16.",
  )
})

test("counts: what is zero is left out", () => {
  const say = (rest) => words.counts(shown(report(rest)), t).map((c) => `${c.text}${c.bad ? "!" : ""}`)
  const rescue = { step: 1, rung: "c 1/32", reason: "" }
  assert.deepEqual(say({ blocks: [block("a", null, { non_finite: 1712345, saturated: 3 })] }), ["NaN/inf 1.7M!", "saturated 3!"])
  assert.deepEqual(say({ rescues: [rescue] }), ["no value saturated, none NaN/inf", "rescued 1"])
  const wide = { stream_dtype: "fp32", blocks: [block("a", 7e4, { saturated: 3, over: 9, level: "ok" })] }
  assert.deepEqual(say(wide), ["no value saturated, none NaN/inf", "beyond fp16 3"])
  assert.deepEqual(countColumns(shown(report(wide))), ["over"])
  assert.deepEqual(countColumns(shown(report({ ...wide, stream_dtype: "fp16" }))), ["saturated", "over"])
  assert.deepEqual(say({ blocks: [] }), [])
})

test("states in words", () => {
  const r = shown(report({ step: 3, total_steps: 8 }))
  const say = (rest) => words.state(view({ report: r, ...rest }), t)
  assert.equal(say({ phase: "running" }), "step 3 of 8")
  assert.equal(say({ phase: "done" }), "done, 8 steps")
  assert.equal(say({ report: shown(report({ outcome: "broken" })) }), "ended after 4 steps, result broken")
  assert.equal(say({ phase: "done", cached: true }), "from cache: report of an earlier run")
  assert.equal(say({ phase: "failed" }), "at step 3 of 8")
  assert.equal(say({ phase: "interrupted" }), "interrupted at step 3 of 8")
  assert.equal(say({ phase: "idle", report: null }), "idle")
  assert.equal(say({ phase: "idle", report: null, queued: true }), "queued")
  assert.equal(say({ phase: "done", queued: true }), "queued · done, 8 steps")
  assert.equal(say({ phase: "running", queued: true }), "step 3 of 8")
  assert.equal(say({ aside: "muted" }), "muted · done, 8 steps")
  assert.equal(say({ phase: "idle", report: null, aside: "bypassed" }), "bypassed")
})

test("a block in words", () => {
  const lines = (rest, more = {}) => {
    const r = shown(report({ blocks: [rest], ...more }))
    return words.blockLines(r.blocks[0], r, t)
  }
  assert.deepEqual(lines(block("layer.0", 5000, { over: 12 })), ["layer.0", "largest |x| 5000", "margin 3.7 bits", "above 4096: 12"])
  assert.deepEqual(lines(block("layer.0", null, { non_finite: 296960 })), ["layer.0", "largest |x| ∞", "NaN or infinity", `NaN/inf 296${THIN}960`])
  assert.deepEqual(lines({ name: "layer.0" }), ["layer.0", "no peak in the report"])
  const beyond = block("layer.0", 7e4, { saturated: 3, level: "ok" })
  assert.deepEqual(lines(beyond, { stream_dtype: "fp32" }), ["layer.0", `largest |x| 70${THIN}000`, "beyond fp16 3"])
})

test("remarks: rescues and messages, not what the first lines say; English sentences where there is nothing else", () => {
  const say = (rest) => words.remarks(view({ report: shown(report(rest)) }), texts).map((line) => line.text)
  const failed = { result: "failed", detail: "layers.0 of another pack" }
  assert.deepEqual(say({ self_check: { result: "passed", detail: null } }), [])
  assert.deepEqual(say({ self_check: failed }), ["Self-check: failed layers.0 of another pack"])
  assert.deepEqual(say({ self_check: failed, messages: [message("said")] }), ["said"])
  assert.deepEqual(say({ messages: undefined, warnings: ["one", "", 3] }), ["one", "3"])
  assert.deepEqual(say({ messages: [message("the image is black", { key: "black_image" }), message("step 1 left the range")] }), ["step 1 left the range"])
  assert.deepEqual(say({ rescues: [{ step: 2, rung: "c 1/32", reason: "layer.22 saturated" }] }), ["Step 2: layer.22 saturated; computed again with c 1/32."])
})

test("a remedy's button needs an input and a value", () => {
  const action = (given) => shown(report({ remedy: remedy({ action: given }) })).remedy.action
  assert.deepEqual(action({ node: "source", input: "fix", value: "auto" }), { input: "fix", value: "auto" })
  for (const odd of [null, {}, { input: "fix" }, { input: "fix", value: 3 }, { input: "", value: "auto" }, "fix"]) assert.equal(action(odd), null)
  assert.equal(shown(report()).remedy, null)
})

test("text from outside is one bounded line", () => {
  assert.equal(text("a\n\tb  c"), "a b c")
  assert.equal(text("x".repeat(900)).length, 400)
  assert.equal(text({}, "?"), "?")
  assert.equal(text("<script>"), "<script>") // shown as it is: the page sets text nodes
})
