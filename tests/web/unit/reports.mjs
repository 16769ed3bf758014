// Reports to test with: the shape of moss_fp16.report/1.

/** The server judges a block's level; here by its peak alone, as for a stream in fp16. */
const levelOf = (peak) => (!Number.isFinite(peak) ? "not_finite" : peak >= 65504 ? "saturated" : peak > 8188 ? "low" : "ok")

export const block = (name, max_abs, rest = {}) => ({
  name, max_abs, over: 0, saturated: 0, clamped: 0, non_finite: 0, headroom_bits: null, level: levelOf(max_abs), ...rest,
})

export const message = (text, rest = {}) => ({ key: "", values: {}, severity: "warn", text, ...rest })
export const remedy = (rest = {}) => ({
  ...message("Set fix = auto on Load MOSS-Image (FP16)."), action: { node: "source", input: "fix", value: "auto" }, ...rest,
})

export const report = (rest = {}) => ({
  schema: "moss_fp16.report/1",
  node_id: "4",
  mode: "online",
  engine: "native",
  compute_dtype: "fp16",
  stream_dtype: "fp16",
  factors: { c: [0.0625], s_attn: [1], s_ffn: [1], eps: "exact" },
  threshold: 4096,
  model_calls: 8,
  steps: 4,
  blocks: [block("text.0", 56), block("text.1", 112), block("layer.0", 640), block("layer.1", 3900)],
  rescues: [],
  summary: { peak: 3900, block: "layer.1", headroom_bits: 4.07, saturated: 0, clamped: 0, non_finite: 0 },
  outcome: "ok",
  verdict: message("OK: the image is not affected by fp16", { severity: "info" }),
  remedy: null,
  messages: [],
  warnings: [],
  error: null,
  state: "done",
  step: 4,
  total_steps: 4,
  cached: false,
  self_check: null,
  ...rest,
})

export const entry = (rest = {}) => {
  const { state = "done", report: given, ...other } = rest
  return { node_id: "4", prompt_id: "p1", workflow_id: "wf", state, report: given ?? report({ state }), live: true, ...other }
}

/** A run of the shipped model's shape: two text blocks, 42 joint blocks, the largest value at layer 22. */
export function run(peak, rest = {}) {
  const layer = (i) => Math.fround(peak * (0.02 + 0.98 * Math.exp(-(((i - 22) / 8) ** 2))))
  const bad = { over: 9, saturated: 6 }
  const layers = Array.from({ length: 42 }, (_, i) => {
    const value = layer(i)
    if (value > 1e5) return block(`layer.${i}`, null, { ...bad, non_finite: 98304 })
    return value > 65504 ? block(`layer.${i}`, 65504, bad) : block(`layer.${i}`, value)
  })
  return report({ blocks: [block("text.0", 56), block("text.1", 112), ...layers], total_steps: 20, step: 20, ...rest })
}

const NONE = { mode: "none", factors: { c: [1], s_attn: [1], s_ffn: [1] } }
const SAVE = "To save the repeated steps set fix = auto on Load MOSS-Image (FP16)."

/** One report of each outcome, as the server would make it. */
export const CASES = {
  fine: run(3904),
  tight: run(52000),
  rescued: run(31000, {
    outcome: "rescued", remedy: remedy({ text: SAVE }), factors: { c: [0.5], s_attn: [1], s_ffn: [1] },
    rescues: [{ step: 4, sigma: 0.71, rung: "online c=1/2", reason: "layer.22 out of range" }],
  }),
  saturated: run(9e4, { ...NONE, outcome: "saturated", remedy: remedy() }),
  broken: run(2e5, {
    ...NONE, outcome: "broken", remedy: remedy(),
    messages: [
      message("The image is black or broken.", { key: "black_image", severity: "error" }),
      message("No fix is active: MOSS-Image runs in fp16 as stored, and the base weights overflow there."),
      message("Step 1: layer.16, layer.17, layer.18 and 10 more out of range in fp16 (guard is set to report, so nothing was done)."),
    ],
  }),
}
