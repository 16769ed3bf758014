// The panel's sentences, built from a normalised report. `t(key, values)` gives a text in the reader's language,
// `say(message)` a sentence of the server.

import * as format from "./format.js"

export const GLYPHS = Object.freeze({
  none: "○", ok: "●", low: "◆", saturated: "▲", not_finite: "✖",
  rescued: "↺", broken: "✖", unknown: "○", failed: "✖", interrupted: "■",
})
const NAMED = 3

/** What the badge says: how the run ended where it did not end well, else what became of the image. */
export function verdict({ phase, report }) {
  if (phase === "failed" || phase === "interrupted") return phase
  return report ? report.outcome : "none"
}

/** "layer.0, layer.1, layer.2 and 3 more". */
function names(blocks, t) {
  const shown = blocks.slice(0, NAMED).map((block) => block.name).join(t("list.comma"))
  return blocks.length > NAMED ? t("list.more", { names: shown, n: blocks.length - NAMED }) : shown
}

const ofLevel = (report, level) => report.blocks.filter((block) => block.level === level)

/** What the first two lines say already. */
const CONSEQUENCES = new Set(["black_image", "some_images_broken", "image_affected"])

/** The first line: what this means for the image, or why the run failed. */
export function headline(view, { t, say }) {
  const { report, phase } = view
  if (phase === "failed") return failure(view, { t, say })
  if (!report) return ""
  if (phase === "running" && report.outcome === "ok" && report.peak?.maxAbs === 0) return t("headline.later")
  return outcomeWords(report, phase, { t, say })
}

function failure({ error, report, errorNode = "" }, { t, say }) {
  const words = error ? say(error) : report?.error ? say(report.error) : ""
  if (!words) return t("headline.failedPlain")
  return errorNode ? t("headline.failedIn", { node: errorNode, error: words }) : t("headline.failed", { error: words })
}

function outcomeWords(report, phase, { t, say }) {
  const ended = phase === "done"
  const last = report.rescues.at(-1)
  const rescue = { step: last?.step ?? "?", rung: last?.rung || "?", n: report.rescues.length }
  switch (report.outcome) {
    case "ok":
      return t(ended ? "headline.ok" : "headline.okRunning")
    case "rescued":
      if (!ended) return t("headline.rescuedRunning", rescue)
      return t(rescue.n > 1 ? "headline.rescued" : "headline.rescuedOnce", rescue)
    case "saturated":
      return t(ended ? "headline.saturated" : "headline.saturatedRunning")
    case "broken": {
      const cause = (report.cause && say(report.cause)) || t("headline.cause")
      if (report.messages.some(({ key }) => key === "some_images_broken")) return t("headline.brokenSome", { cause })
      return t(ended ? "headline.broken" : "headline.brokenRunning", { cause })
    }
    default:
      return t(report.messages.some(({ key }) => key === "small_factor") ? "headline.smallFactor" : "headline.unknown")
  }
}

/** The number behind it: where NaN or infinity is, else the largest value and the margin it leaves. */
export function fact(report, t) {
  if (report.blocks.length === 0) return ""
  const broken = ofLevel(report, "not_finite")
  if (broken.length > 0) return t("fact.notFinite", { blocks: names(broken, t) })
  const saturated = ofLevel(report, "saturated")
  if (saturated.length > 0) return t("fact.saturated", { blocks: names(saturated, t) })
  const block = report.peak
  if (!block) return t("fact.noPeaks")
  if (block.maxAbs === 0) return t("fact.zero")
  const values = { block: block.name, peak: format.peak(block.maxAbs), dtype: report.streamDtype, bits: format.bits(block.bits) }
  if (!report.limited) return t(block.bits < 0 ? "fact.wideOver" : "fact.wide", values)
  return t(block.level === "low" ? "fact.marginSmall" : "fact.margin", values)
}

/** A factor, or several that are not all 1 as one text. */
function factorWords({ c, sAttn, sFfn }) {
  const parts = []
  if (c.length) parts.push(`c ${format.factors(c)}`)
  if (sAttn.some((s) => s !== 1)) parts.push(`s_attn ${format.factors(sAttn)}`)
  if (sFfn.some((s) => s !== 1)) parts.push(`s_ffn ${format.factors(sFfn)}`)
  return parts.join(", ")
}

/** Whether a fix is at work, and what it does. */
export function action(report, t) {
  const parts = []
  if (report.clamped > 0) parts.push(t("action.clamped", { n: format.grouped(report.clamped) }))
  const { baked } = report.factors
  const factors = format.factors(report.factors.c)
  if (report.mode === "online") parts.push(t("action.online", { factors }))
  else if (report.mode === "weights") parts.push(t("action.weights", { factors: baked ? format.factors(baked.c) : factors }))
  else if (report.mode === "fp32_residual") parts.push(t("action.fp32Residual"))
  else if (report.mode === "none") parts.push(t("action.none"))
  return parts.join(" ")
}

/** The status line's parts: what ran. */
export function setup(report, t) {
  const { baked, clamp } = report.factors
  return [
    t("setup.fix", { mode: report.mode }),
    t("setup.engine", { engine: report.engine }),
    report.computeDtype,
    factorWords(report.factors),
    baked && baked.c.length > 0 ? `baked c ${format.factors(baked.c)}` : "",
    clamp === null ? "" : `clamp ±${format.exact(clamp)}`,
  ].filter((part) => part)
}

/** The status line's counts: [{text, title, bad}]; zeros are left out, and where all are zero that is said. */
export function counts(report, t) {
  if (report.blocks.length === 0) return []
  const saturated = report.limited ? report.saturated : 0
  const all = [
    { key: "count.nonFinite", value: report.nonFinite, bad: true },
    { key: "count.saturated", value: saturated, bad: true },
    { key: "count.beyond", value: report.saturated - saturated, bad: false },
    { key: "count.clamped", value: report.clamped, bad: false },
    { key: "count.rescued", value: report.rescues.length, bad: false },
  ]
  const shown = all
    .filter(({ value }) => value > 0)
    .map(({ key, value, bad }) => ({ text: t(key, { n: format.count(value) }), title: format.grouped(value), bad }))
  const clean = report.nonFinite === 0 && saturated === 0
  return clean ? [{ text: t("count.clean"), title: "", bad: false }, ...shown] : shown
}

/** The state in words: idle, queued, step k of n, done, failed, interrupted, cached, muted, bypassed. */
export function state(view, t) {
  const words = runState(view, t)
  if (view.aside) return view.report ? `${t(`state.${view.aside}`)} · ${words}` : t(`state.${view.aside}`)
  if (view.queued && view.phase !== "running" && view.phase !== "waiting") {
    return view.phase === "idle" ? t("state.queued") : `${t("state.queued")} · ${words}`
  }
  return words
}

function runState({ report, phase, cached }, t) {
  const steps = report && report.totalSteps > 0 ? { k: report.step, n: report.totalSteps } : null
  switch (phase) {
    case "waiting":
      return t("state.waiting")
    case "running":
      return steps ? t("state.step", steps) : t("state.running")
    case "done":
      if (cached) return t("state.cached")
      if (!report || report.step === 0) return t("state.done")
      return t(report.outcome === "broken" ? "state.brokenSteps" : "state.doneSteps", { n: report.totalSteps || report.step })
    case "failed":
      return steps ? t("state.failedAt", steps) : t("state.failed")
    case "interrupted":
      return steps ? t("state.interruptedAt", steps) : t("state.interrupted")
    case "unsampled":
      return t("state.unsampled")
    default:
      return t("state.idle")
  }
}

/** One block in words, for a tooltip and for a screen reader: a list of lines. */
export function blockLines(block, report, t) {
  if (block.maxAbs === null) return [block.name, t("block.unknown")]
  const lines = [block.name, t("block.peak", { peak: format.exact(block.maxAbs) })]
  if (block.maxAbs === Infinity) lines.push(t("block.overflow"))
  else if (block.bits !== null && report.limited) lines.push(t("block.headroom", { bits: format.bits(block.bits) }))
  const limit = report.limited ? "count.saturated" : "count.beyond"
  if (block.saturated > 0) lines.push(t(limit, { n: format.grouped(block.saturated) }))
  else if (block.over > 0) lines.push(t("block.over", { n: format.grouped(block.over), threshold: format.exact(report.threshold) }))
  if (block.clamped > 0) lines.push(t("count.clamped", { n: format.grouped(block.clamped) }))
  if (block.nonFinite > 0) lines.push(t("count.nonFinite", { n: format.grouped(block.nonFinite) }))
  return lines
}

/** What else there is to say, one line each, the server's order kept: [{text, severity}]. */
export function remarks(view, { t, say }) {
  const lines = view.notes.map((note) => ({ text: t(note), severity: "warn" }))
  const { report } = view
  if (!report) return lines
  for (const { step, rung, reason } of report.rescues) {
    const words = say(reason)
    if (words) lines.push({ text: t("remark.rescue", { step: step ?? "?", rung: rung || "?", reason: words }), severity: "info" })
  }
  // The server's own sentence about it is among the messages.
  if (report.selfCheck?.result === "failed" && report.messages.length === 0) {
    lines.push({ text: t("remark.selfCheck", report.selfCheck), severity: "warn" })
  }
  const rest = report.messages.filter(({ key }) => !CONSEQUENCES.has(key))
  const said = rest.map((message) => ({ text: say(message), severity: message.severity }))
  return [...lines, ...said.filter(({ text }) => text !== "")]
}
