// The panel's sentences, built from a normalised report. `t(key, values)` gives a text in the reader's language.

import * as format from "./format.js"
import { headroomBits } from "./scale.js"

export const GLYPHS = Object.freeze({ none: "○", ok: "●", wide: "◇", close: "◆", tight: "▲", over: "✖", rescued: "↺" })

/**
 * The verdict of a whole report: a block level, or "rescued" where the guard computed bad calls again. The counts of a
 * call that was computed again are not in the report, so an overflow that is in it was not rescued.
 */
export function verdict(report) {
  if (report.blocks.length === 0) return "none"
  return report.rescues.length > 0 && report.level !== "over" ? "rescued" : report.level
}

/**
 * "layer.22 peaks 3.1e4 · 1.1 bits of headroom": the block nearest to overflow, in words.
 * On a device that cannot copy its counters while it works, a running report holds zeros only.
 */
export function headline(report, t, running = false) {
  const block = report.peak
  if (!block) return report.blocks.length === 0 ? "" : t("headline.noPeaks")
  const values = { block: block.name, peak: format.peak(block.maxAbs) }
  if (block.maxAbs === Infinity) {
    const more = report.blocks.filter((b) => b.maxAbs === Infinity).length - 1
    return more > 0 ? t("headline.overflowMany", { ...values, n: more }) : t("headline.overflow", values)
  }
  if (block.maxAbs === 0) return t(running ? "headline.later" : "headline.zero")
  const bits = headroomBits(block.maxAbs)
  if (!report.limited) {
    return t(bits <= 0 ? "headline.wideOver" : "headline.wide", {
      ...values,
      dtype: report.streamDtype,
      bits: format.bits(Math.abs(bits)),
    })
  }
  if (bits <= 0) return t("headline.saturated", values)
  return t("headline.headroom", { ...values, bits: format.bits(bits) })
}

function factorWords(report) {
  const { c, sAttn, sFfn } = report.factors
  const parts = []
  if (c.length) parts.push(`c ${format.factors(c)}`)
  if (sAttn.some((s) => s !== 1)) parts.push(`s_attn ${format.factors(sAttn)}`)
  if (sFfn.some((s) => s !== 1)) parts.push(`s_ffn ${format.factors(sFfn)}`)
  return parts.join(", ")
}

/** What was done about it: a rescue first, then clamping, then the fold, then nothing. */
export function action(report, t) {
  if (report.rescues.length > 0) {
    const last = report.rescues[report.rescues.length - 1]
    const values = { step: last.step ?? "?", rung: last.rung || "?", reason: last.reason, n: report.rescues.length }
    const key = report.rescues.length === 1 ? "action.rescuedOnce" : "action.rescued"
    const said = t(key, values)
    return last.reason ? `${said} (${last.reason})` : said
  }
  const parts = []
  if (report.clamped > 0) parts.push(t("action.clamped", { n: format.count(report.clamped) }))
  if (report.saturated > 0) parts.push(t("action.saturated", { n: format.count(report.saturated) }))
  const factors = factorWords(report)
  const fold = { factors }
  if (report.mode === "online") parts.push(t("action.online", fold))
  else if (report.mode === "weights") parts.push(t("action.weights", { factors: bakedWords(report) || factors }))
  else if (report.mode === "fp32_residual") parts.push(t("action.fp32Residual"))
  else if (report.mode === "none") parts.push(t("action.none"))
  return parts.join(" ")
}

function bakedWords(report) {
  const baked = report.factors.baked
  return baked && baked.c.length ? `c ${format.factors(baked.c)}` : ""
}

/** The status line's parts: what ran. */
export function setup(report) {
  const baked = bakedWords(report)
  const clamp = report.factors.clamp === null ? "" : `clamp ±${format.exact(report.factors.clamp)}`
  const parts = [report.mode, report.engine, report.computeDtype, factorWords(report), baked && `baked ${baked}`, clamp]
  return parts.filter((part) => part)
}

/** The status line's counts: [{key, value, bad}], always all four, so that a zero is seen to be zero. */
export function counts(report) {
  return [
    { key: "count.saturated", value: report.saturated, bad: report.limited && report.saturated > 0 },
    { key: "count.clamped", value: report.clamped, bad: false },
    { key: "count.nonFinite", value: report.nonFinite, bad: report.nonFinite > 0 },
    { key: "count.rescued", value: report.rescues.length, bad: false },
  ]
}

/** The state in words: idle, step k of n, done, failed, interrupted, cached. */
export function state(view, t) {
  const { report, phase } = view
  const steps = report && report.totalSteps > 0 ? { k: report.step, n: report.totalSteps } : null
  switch (phase) {
    case "waiting":
      return t("state.waiting")
    case "running":
      return steps ? t("state.step", steps) : t("state.running")
    case "done":
      if (view.cached) return t("state.cached")
      return report && report.step > 0 ? t("state.doneSteps", { n: report.totalSteps || report.step }) : t("state.done")
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
export function blockLines(block, limited, t) {
  if (block.level === "none") return [block.name, t("block.unknown")]
  const lines = [block.name, t("block.peak", { peak: format.exact(block.maxAbs) })]
  if (block.maxAbs === Infinity) lines.push(t("block.overflow"))
  else if (block.bits !== null && limited) lines.push(t("block.headroom", { bits: format.bits(block.bits) }))
  if (block.saturated > 0) lines.push(`${t("count.saturated")} ${block.saturated}`)
  else if (block.over > 0) lines.push(t("block.over", { n: block.over }))
  if (block.clamped > 0) lines.push(`${t("count.clamped")} ${block.clamped}`)
  if (block.nonFinite > 0) lines.push(`${t("count.nonFinite")} ${block.nonFinite}`)
  return lines
}

/** Warnings, odd fields and the self-check's finding, one line each. */
export function remarks(view, t) {
  const lines = view.notes.map((note) => t(note))
  const report = view.report
  if (view.error) lines.push(t("remark.error", { error: view.error }))
  if (!report) return lines
  // The server's own sentence about it is among the warnings.
  if (report.selfCheck?.result === "failed" && report.warnings.length === 0) {
    lines.push(t("remark.selfCheck", { result: report.selfCheck.result, detail: report.selfCheck.detail }))
  }
  return [...lines, ...report.warnings]
}
