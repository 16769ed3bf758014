// The panel's texts. Translations live in locales/<language>/main.json under "mossFP16" and come from ComfyUI's own
// /i18n route; the English below is what shows when that route or a translation is missing. The server's own sentences
// are under "message" there and have no English here: they come with one.

export const SECTION = "mossFP16"

export const ENGLISH = Object.freeze({
  "panel.label": "MOSS saturation report",
  "panel.idle": "Queue the workflow: this panel then shows each block's peak against the fp16 maximum.",
  "panel.waiting": "Waiting for the first step.",
  "panel.unsampled": "The last run sampled nothing through this node.",
  "panel.noBlocks": "The report holds no blocks.",
  "panel.failed": "The run stopped before the first step.",
  "panel.instance": "subgraph instance {id}",
  "panel.source": "live from {node}",
  "button.table": "Show as a table",
  "button.chart": "Show as a chart",
  "button.copy": "Copy the report as JSON",
  "button.save": "Save the report as a JSON file",
  "button.copied": "Copied",
  "button.copyFailed": "The browser refused to copy. Use save instead.",
  "chart.label": "Largest |x| in each block's stream, log2 scale, with the fp16 maximum as a line. Arrow keys read the blocks.",
  "chart.limit": "fp16 max 65504",
  "chart.text": "text",
  "chart.bits": "{bits} bits",
  "chart.overflow": "overflow",
  "table.caption": "Peaks and counts per block",
  "table.block": "Block",
  "table.peak": "Peak |x|",
  "table.headroom": "Headroom, bits",
  "table.over": "Over threshold",
  "table.saturated": "Saturated",
  "table.clamped": "Clamped",
  "table.nonFinite": "Non-finite",
  "level.none": "No peaks",
  "level.ok": "In range",
  "level.wide": "Above fp16, held",
  "level.close": "Little headroom",
  "level.tight": "Near overflow",
  "level.over": "Overflow",
  "level.rescued": "Rescued",
  "headline.headroom": "{block} peaks {peak} · {bits} bits of headroom",
  "headline.saturated": "{block} peaks {peak} · no headroom: at the fp16 maximum",
  "headline.overflow": "{block} overflowed: values that are not finite",
  "headline.overflowMany": "{block} and {n} more overflowed: values that are not finite",
  "headline.wide": "{block} peaks {peak} · stream is {dtype}, {bits} bits under the fp16 maximum",
  "headline.wideOver": "{block} peaks {peak} · stream is {dtype}, {bits} bits above the fp16 maximum",
  "headline.zero": "Every block's peak is 0",
  "headline.later": "The numbers come when the run ends",
  "headline.noPeaks": "No peaks were measured",
  "action.rescuedOnce": "Rescued at step {step} with {rung}",
  "action.rescued": "Rescued {n} times, last at step {step} with {rung}",
  "action.clamped": "{n} values were clamped.",
  "action.saturated": "{n} values saturated.",
  "action.online": "Folded online with {factors}.",
  "action.weights": "The weights carry the fold: {factors}.",
  "action.fp32Residual": "The stream is kept in fp32.",
  "action.none": "No fix was applied.",
  "count.saturated": "saturated",
  "count.clamped": "clamped",
  "count.nonFinite": "non-finite",
  "count.rescued": "rescued",
  "state.idle": "idle",
  "state.waiting": "run started",
  "state.running": "running",
  "state.step": "step {k} of {n}",
  "state.done": "done",
  "state.doneSteps": "done, {n} steps",
  "state.cached": "from cache: report of an earlier run",
  "state.failed": "failed",
  "state.failedAt": "failed at step {k} of {n}",
  "state.interrupted": "interrupted",
  "state.interruptedAt": "interrupted at step {k} of {n}",
  "state.unsampled": "not sampled",
  "block.peak": "peak |x| {peak}",
  "block.headroom": "{bits} bits of headroom",
  "block.overflow": "not finite: overflowed",
  "block.over": "over threshold {n}",
  "block.unknown": "no peak in the report",
  "remark.error": "Error: {error}",
  "remark.selfCheck": "Self-check: {result} {detail}",
  "refused.notObject": "The server sent something that is not a report, so nothing is shown.",
  "refused.notReport": "The server sent an object that is not a saturation report, so nothing is shown.",
  "refused.newer": "This report is of a newer schema that this panel cannot read. Update ComfyUI-MOSS-FP16 and reload the page.",
  "refused.noBlocks": "The report has no list of blocks, so there is nothing to draw.",
  "note.newer": "The report is of a newer schema: parts of it may be missing here.",
  "note.noSchema": "The report does not name its schema.",
  "note.truncated": "Only the first 1024 blocks are shown.",
  "toast.title": "MOSS FP16",
  "list.comma": ", ",
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
