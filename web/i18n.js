// The panel's texts. Translations live in locales/<language>/main.json under "mossFP16" and come from ComfyUI's own
// /i18n route; the English below is what shows when that route or a translation is missing. The server's own sentences
// are under "message" there and have no English here: they come with one.

export const SECTION = "mossFP16"

export const ENGLISH = Object.freeze({
  "panel.label": "MOSS saturation report",
  "panel.idle": "Queue the workflow. This chart then shows how near each block came to fp16's limit.",
  "panel.small": "The Report node beside it shows the run.",
  "panel.queued": "Queued. It starts when the runs before it are over.",
  "panel.waiting": "Waiting for the first step.",
  "panel.unsampled": "Not used in the last run.",
  "panel.noBlocks": "The report holds no blocks.",
  "panel.failed": "The run stopped before the first step.",
  "panel.muted": "Muted: this node does not run.",
  "panel.bypassed": "Bypassed: the MODEL passes through unchanged.",
  "panel.bypassedReport": "Bypassed: no report is made.",
  "panel.instance": "subgraph instance {id}",
  "panel.live": "live from {node}",
  "panel.from": "from {node}",
  "button.table": "Show as a table",
  "button.chart": "Show as a chart",
  "button.copy": "Copy the report as JSON",
  "button.save": "Save the report as a JSON file",
  "button.copied": "Copied",
  "button.copyFailed": "The browser refused to copy. Use save instead.",
  "button.expand": "Show the whole panel here",
  "button.shrink": "Keep it small: the Report node shows it all",
  "button.set": "Set {input} = {value}",
  "button.setOn": "Changes {input} on {node}. Ctrl+Z takes it back.",
  "button.isSet": "{input} = {value} is set. Queue again.",
  "button.more": "{n} more",
  "button.less": "Show fewer",
  "button.advanced": "Show advanced inputs ({n})",
  "button.advancedChanged": "Show advanced inputs ({n}, {changed} changed)",
  "button.basic": "Hide advanced inputs",
  "hint.c": "auto (1/16)",
  "hint.paramDtypes": "param_dtypes, such as layers.*.proj.o.weight = fp32",
  "chart.label": "Largest |x| in each block's stream, log2 scale, with the fp16 limit as a line. Arrow keys read the blocks.",
  "chart.limit": "fp16 limit",
  "chart.text": "text",
  "chart.bits": "{bits} bits",
  "table.caption": "Peaks and counts per block",
  "table.block": "Block",
  "table.peak": "Peak |x|",
  "table.headroom": "Margin, bits",
  "table.over": "> {threshold}",
  "table.saturated": "Saturated",
  "table.clamped": "Clamped",
  "table.nonFinite": "NaN/inf",
  "verdict.ok": "OK",
  "verdict.rescued": "Rescued",
  "verdict.saturated": "Saturated",
  "verdict.broken": "Broken",
  "verdict.unknown": "Not measured",
  "verdict.failed": "Failed",
  "verdict.interrupted": "Interrupted",
  "headline.ok": "Image not affected by fp16",
  "headline.okRunning": "In range so far",
  "headline.rescuedOnce": "Image is fine: step {step} was computed again with {rung}",
  "headline.rescued": "Image is fine: {n} steps were computed again, the last with {rung}",
  "headline.rescuedRunning": "In range again: step {step} was computed again with {rung}",
  "headline.saturated": "Image may be wrong: values hit fp16's limit",
  "headline.saturatedRunning": "Image may turn out wrong: values hit fp16's limit",
  "headline.broken": "Image is black or broken: {cause}",
  "headline.brokenRunning": "Image will be black or broken: {cause}",
  "headline.brokenSome": "Images of the batch are broken: {cause}",
  "headline.cause": "the model left fp16's range",
  "headline.unknown": "Nothing was counted",
  "headline.smallFactor": "Image may be wrong: with so small a factor fp16 loses bits",
  "headline.failed": "The run failed: {error}",
  "headline.failedIn": "{node} failed: {error}",
  "headline.failedPlain": "The run failed",
  "headline.later": "The numbers come when the run ends",
  "fact.margin": "largest value {peak} in {block} · margin {bits} bits",
  "fact.marginSmall": "largest value {peak} in {block} · margin {bits} bits (small)",
  "fact.saturated": "{blocks} reached fp16's limit of 65504",
  "fact.notFinite": "NaN or infinity in {blocks}",
  "fact.wide": "largest value {peak} in {block} · the stream is {dtype}, so 65504 is no limit",
  "fact.wideOver": "largest value {peak} in {block} · beyond fp16, but the stream is {dtype}",
  "fact.zero": "Every block's largest value is 0",
  "fact.noPeaks": "No largest values were measured",
  "list.comma": ", ",
  "list.more": "{names} and {n} more",
  "list.sentence": ". ",
  "action.clamped": "{n} values were clamped.",
  "action.online": "Fix active: stream scaled by {factors}.",
  "action.weights": "Fix active: the weights carry it, stream scaled by {factors}.",
  "action.fp32Residual": "Fix active: the stream is kept in fp32.",
  "action.none": "No fix is active.",
  "setup.fix": "fix {mode}",
  "setup.engine": "engine {engine}",
  "setup.title": "What ran: the fix, the forward that computed it (engine), the compute dtype, the factors",
  "count.clean": "no value saturated, none NaN/inf",
  "count.saturated": "saturated {n}",
  "count.beyond": "beyond fp16 {n}",
  "count.clamped": "clamped {n}",
  "count.nonFinite": "NaN/inf {n}",
  "count.rescued": "rescued {n}",
  "state.idle": "idle",
  "state.queued": "queued",
  "state.muted": "muted",
  "state.bypassed": "bypassed",
  "state.waiting": "run started",
  "state.running": "running",
  "state.step": "step {k} of {n}",
  "state.done": "done",
  "state.doneSteps": "done, {n} steps",
  "state.brokenSteps": "ended after {n} steps, result broken",
  "state.cached": "from cache: report of an earlier run",
  "state.failed": "before the first step",
  "state.failedAt": "at step {k} of {n}",
  "state.interrupted": "before the first step",
  "state.interruptedAt": "interrupted at step {k} of {n}",
  "state.unsampled": "not used",
  "block.peak": "largest |x| {peak}",
  "block.headroom": "margin {bits} bits",
  "block.overflow": "NaN or infinity",
  "block.over": "above {threshold}: {n}",
  "block.unknown": "no peak in the report",
  "remark.selfCheck": "Self-check: {result} {detail}",
  "remark.rescue": "Step {step}: {reason}; computed again with {rung}.",
  "refused.notObject": "The server sent something that is not a report, so nothing is shown.",
  "refused.notReport": "The server sent an object that is not a saturation report, so nothing is shown.",
  "refused.newer": "This report is of a newer schema that this panel cannot read. Update ComfyUI-MOSS-FP16 and reload the page.",
  "refused.noBlocks": "The report has no list of blocks, so there is nothing to draw.",
  "note.newer": "The report is of a newer schema: parts of it may be missing here.",
  "note.noSchema": "The report does not name its schema.",
  "note.truncated": "Only the first 1024 blocks are shown.",
  "note.broken": "This panel could not be drawn: {error}",
  "toast.title": "MOSS FP16",
  "toast.black": "Image is black or broken",
  "toast.because": "Cause: {cause}. {remedy}",
  "toast.rescued": "Rescued: the image is fine",
  "toast.error": "MOSS FP16: the image is affected",
  "toast.warn": "MOSS FP16: check this run",
})

/** Fills {name} placeholders. A placeholder without a value stays as it is. */
export function fill(text, values = {}) {
  return text.replace(/\{(\w+)\}/g, (whole, name) => (Object.hasOwn(values, name) ? String(values[name]) : whole))
}

/** The nested table of a locale file as flat "a.b" keys, strings only. */
export function flatten(table, prefix = "") {
  const flat = {}
  for (const [name, value] of Object.entries(table ?? {})) {
    if (typeof value === "string") flat[`${prefix}${name}`] = value
    else if (value && typeof value === "object") Object.assign(flat, flatten(value, `${prefix}${name}.`))
  }
  return flat
}

export class Texts {
  #languages = new Map()
  #locale = "en"

  /** Takes the server's /i18n answer: {language: {mossFP16: {...}, ...}, ...}. */
  load(translations) {
    for (const [language, sections] of Object.entries(translations ?? {})) {
      if (sections?.[SECTION]) this.#languages.set(language.toLowerCase(), flatten(sections[SECTION]))
    }
  }

  set locale(name) {
    this.#locale = typeof name === "string" && name ? name.toLowerCase() : "en"
  }

  get locale() {
    return this.#locale
  }

  /** A text in the reader's language, else in its base language ("zh" for "zh-TW"), else in English. */
  t = (key, values) => {
    const own = this.#languages.get(this.#locale) ?? this.#languages.get(this.#locale.split("-")[0])
    return fill(own?.[key] ?? ENGLISH[key] ?? key, values)
  }

  /**
   * A sentence of the server, {key, values, text}, in the reader's language; its English `text` where there is no
   * translation. A value may be such a message itself, or a list of values.
   */
  say = ({ key, values = {}, text = "" }) => {
    const languages = [this.#locale, this.#locale.split("-")[0], "en"]
    const found = languages.map((language) => this.#languages.get(language)?.[`message.${key}`]).find((words) => words)
    return found === undefined ? text : fill(found, this.#inWords(values))
  }

  #inWords(values) {
    const one = (value) => {
      if (Array.isArray(value)) return value.map(one).join(this.t("list.comma"))
      return value !== null && typeof value === "object" && "key" in value ? this.say(value) : value
    }
    return Object.fromEntries(Object.entries(values ?? {}).map(([name, value]) => [name, one(value)]))
  }
}
