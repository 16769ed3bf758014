// Reports to test with: the shape of moss_fp16.report/1.

export const block = (name, max_abs, rest = {}) => ({
  name, max_abs, over: 0, saturated: 0, clamped: 0, non_finite: 0, headroom_bits: null, ...rest,
})

export const report = (rest = {}) => ({
  schema: "moss_fp16.report/1",
  node_id: "4",
  mode: "online",
  engine: "native",
  compute_dtype: "fp16",
  stream_dtype: "fp16",
  factors: { c: [0.0625], s_attn: [1], s_ffn: [1], eps: "exact" },
  threshold: 65504,
  model_calls: 8,
  steps: 4,
  blocks: [block("text.0", 56), block("text.1", 112), block("layer.0", 640), block("layer.1", 3900)],
  rescues: [],
  summary: { peak: 3900, block: "layer.1", headroom_bits: 4.07, saturated: 0, clamped: 0, non_finite: 0 },
  warnings: [],
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
