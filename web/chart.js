// The chart: one bar per block on a log2 axis under the fp16 maximum. The gap to the line is the headroom in bits.

import { html, put, putText, svg } from "./dom.js"
import * as format from "./format.js"
import { textBlocks } from "./report.js"
import { FP16_MAX_LOG2, axis, bandAt, bands, project } from "./scale.js"
import { blockLines } from "./words.js"

// Above the limit line there is a row for marks and, over it, one for the line's name: nothing is drawn on anything.
const MARK_ROW = 11
const MARGIN = { left: 38, right: 6, top: 24, bottom: 15 }
const STRIP = { left: 0, right: 0, top: MARK_ROW, bottom: 1 }
const OVERSHOOT = 3 // how far a bar that is not finite goes beyond the line
const LABELLED = 96 // the height from which the axis and the limit are named
let serial = 0

/** A mark above the bar, so that a level is told by its shape too. Drawn around (0, 0), growing upwards. */
const MARKS = {
  low: "M0,-6 L3,-3 L0,0 L-3,-3 Z",
  saturated: "M0,-6.5 L3.8,0 L-3.8,0 Z",
  not_finite: "M-3,-6.6 L3,-0.6 M3,-6.6 L-3,-0.6",
}
const HATCH_FROM = 3 // px: a bar narrower than this has room for its colour and mark only

function hatch(id, level, crossed) {
  const pattern = { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }
  const stripes = [svg("rect", { width: 1.3, height: 4, class: "moss-hatch" })]
  if (crossed) stripes.push(svg("rect", { width: 4, height: 1.3, class: "moss-hatch" }))
  return svg("pattern", pattern, svg("rect", { width: 4, height: 4, class: `moss-fill-${level}` }), ...stripes)
}

export class Chart {
  #bars = []
  #places = []
  #shown = -1
  #drawn = null

  constructor(t) {
    this.t = t
    const id = `moss-${++serial}`
    this.ids = { saturated: `${id}-saturated`, not_finite: `${id}-not-finite` }
    const defs = svg("defs", {}, hatch(this.ids.saturated, "saturated", false), hatch(this.ids.not_finite, "not_finite", true))
    this.grid = svg("g", { class: "moss-grid", "aria-hidden": "true" })
    this.danger = svg("rect", { class: "moss-danger" })
    this.barGroup = svg("g", { class: "moss-bars" })
    this.limit = svg("line", { class: "moss-limit" })
    this.limitLabel = svg("text", { class: "moss-limit-label" })
    this.gap = svg("g", { class: "moss-gap", "aria-hidden": "true" })
    this.marks = svg("g", { class: "moss-marks", "aria-hidden": "true" })
    this.svg = svg("svg", { role: "group", class: "moss-chart" }, defs, this.danger, this.grid, this.barGroup, this.limit)
    this.svg.append(this.marks, this.limitLabel, this.gap)
    this.tip = html("div", { class: "moss-tip", role: "tooltip", hidden: "" })
    this.root = html("div", { class: "moss-chart-box" }, this.svg, this.tip)
    this.#listen()
  }

  /**
   * Draws the report into the box's present size; an axis without bars where there is none yet. `strip`: bars and limit
   * alone, for a panel that is kept small. Bars are kept, so the keyboard's place is too.
   */
  draw(report, strip = false) {
    const width = this.root.clientWidth
    const height = this.root.clientHeight
    if (width < 40 || height < 24) return
    const blocks = report?.blocks ?? []
    this.#drawn = { report, width, height }
    put(this.svg, "viewBox", `0 0 ${width} ${height}`)
    put(this.svg, "aria-label", this.t("chart.label"))
    const labelled = !strip && height >= LABELLED
    const margin = strip ? STRIP : labelled ? MARGIN : { ...MARGIN, top: MARK_ROW + 2 }
    const plot = { left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom }
    const scale = axis(blocks.map((block) => block.maxAbs))
    const y = (log2) => project(log2, scale.low, scale.high, plot.bottom, plot.top)
    const leading = textBlocks(blocks)
    const groups = [leading, blocks.length - leading]
    this.#places = bands(groups, plot.right - plot.left).map((p) => ({ ...p, x: p.x + plot.left }))
    if (strip) this.grid.replaceChildren()
    else this.#drawGrid(plot, scale, y, groups)
    this.#drawLimit(plot, y, labelled)
    this.#drawBars(report, plot, y)
    this.#drawGap(report, plot, y, labelled)
    if (this.#shown >= 0) this.#showTip(this.#shown)
  }

  #drawGrid(plot, scale, y, groups) {
    const parts = []
    const limit = y(FP16_MAX_LOG2)
    const label = (at, words, name = "") =>
      parts.push(svg("text", { x: plot.left - 4, y: at + 3.5, "text-anchor": "end", class: name }, words))
    let below = plot.bottom + 24
    for (const tick of scale.ticks) {
      const at = y(tick)
      parts.push(svg("line", { x1: plot.left, x2: plot.right, y1: at, y2: at }))
      if (below - at < 12 || Math.abs(at - limit) < 12) continue
      label(at, format.tick(tick))
      below = at
    }
    label(limit, "65504", "moss-limit-tick")
    this.#drawFooter(parts, plot, groups)
    this.grid.replaceChildren(...parts)
  }

  #drawFooter(parts, plot, [texts, layers]) {
    const label = (x, anchor, words) =>
      parts.push(svg("text", { x, y: plot.bottom + 11, "text-anchor": anchor }, words))
    const places = this.#places
    const middle = (place) => place.x + place.width / 2
    if (texts > 0) {
      // Two refiner bars are narrower than the word under them: it starts at the axis and the layers' begins after it.
      label(plot.left, "start", this.t("chart.text"))
    }
    if (layers === 0) return
    const first = texts
    const last = texts + layers - 1
    const spare = plot.right - middle(places[first])
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => (spare / layers) * n >= 22) ?? layers
    for (let i = 0; i < layers; i += every) {
      const x = middle(places[first + i])
      if (x - plot.left < 24 && texts > 0 && i === 0) continue
      if (last - first - i < every && plot.right - x < 14 && i !== layers - 1) continue
      label(x, "middle", String(i))
    }
  }

  #drawLimit(plot, y, labelled) {
    const at = y(FP16_MAX_LOG2)
    for (const [name, value] of Object.entries({ x1: plot.left, x2: plot.right, y1: at, y2: at })) {
      put(this.limit, name, value)
    }
    const top = at - MARK_ROW
    const area = { x: plot.left, y: top, width: plot.right - plot.left, height: at - top }
    for (const [name, value] of Object.entries(area)) put(this.danger, name, value)
    put(this.limitLabel, "x", plot.right)
    put(this.limitLabel, "y", top - 3)
    putText(this.limitLabel, labelled ? this.t("chart.limit") : "")
  }

  #drawBars(report, plot, y) {
    const blocks = report?.blocks ?? []
    while (this.#bars.length > blocks.length) this.#dropBar()
    while (this.#bars.length < blocks.length) this.#bars.push(this.#newBar(this.#bars.length))
    blocks.forEach((block, index) => this.#drawBar(this.#bars[index], block, this.#places[index], plot, y, report))
    // One tab stop for all bars: the one that has the focus, else the one nearest to overflow.
    const focused = this.#focusedBar()
    const stop = Math.max(0, focused >= 0 ? focused : blocks.indexOf(report?.peak))
    this.#bars.forEach((bar, index) => put(bar.group, "tabindex", index === stop ? 0 : -1))
  }

  #drawBar(bar, block, place, plot, y, report) {
    const top = topOf(block, plot, y)
    const gap = Math.min(2, place.width * 0.18)
    put(bar.rect, "x", place.x + gap / 2)
    put(bar.rect, "width", Math.max(0.5, place.width - gap))
    put(bar.rect, "y", top)
    put(bar.rect, "height", Math.max(0.75, plot.bottom - top))
    bar.rect.style.strokeWidth = String(Math.min(0.9, place.width * 0.12)) // else a thin bar is all outline
    put(bar.group, "class", `moss-bar moss-level-${block.level}`)
    const pattern = this.ids[block.level]
    bar.rect.style.fill = pattern && place.width >= HATCH_FROM ? `url(#${pattern})` : ""
    put(bar.mark, "class", `moss-mark moss-level-${block.level}`)
    put(bar.mark, "d", MARKS[block.level] ?? "")
    const size = Math.min(1, Math.max(0.55, place.width / 7))
    put(bar.mark, "transform", `translate(${place.x + place.width / 2} ${top - 1.5}) scale(${size})`)
    put(bar.group, "aria-label", blockLines(block, report, this.t).join(this.t("list.comma")))
  }

  #dropBar() {
    const bar = this.#bars.pop()
    bar.group.remove()
    bar.mark.remove()
  }

  #newBar(index) {
    const rect = svg("rect")
    const mark = svg("path", { class: "moss-mark" })
    const group = svg("g", { role: "img", tabindex: -1 }, rect)
    group.addEventListener("focus", () => this.#showTip(index))
    group.addEventListener("blur", () => this.#hideTip())
    this.barGroup.append(group)
    this.marks.append(mark)
    return { group, rect, mark }
  }

  /** A measure from the highest bar to the line, with the bits beside it where there is room for both. */
  #drawGap(report, plot, y, labelled) {
    const block = report?.peak
    const index = report ? report.blocks.indexOf(block) : -1
    const line = y(FP16_MAX_LOG2)
    const marked = index >= 0 && block.level in MARKS ? 9 : 0
    const top = index >= 0 ? topOf(block, plot, y) - marked : line
    if (!labelled || index < 0 || !report.limited || !(block.maxAbs > 0) || top - line < 20) return this.gap.replaceChildren()
    const x = this.#places[index].x + this.#places[index].width / 2
    const parts = [svg("line", { x1: x, x2: x, y1: top, y2: line })]
    for (const end of [top, line]) parts.push(svg("line", { x1: x - 3, x2: x + 3, y1: end, y2: end }))
    const words = this.t("chart.bits", { bits: format.bits(block.bits) })
    const right = x + 14 + words.length * 6.5 < plot.right
    parts.push(svg("text", { x: right ? x + 7 : x - 7, y: (top + line) / 2 + 4, "text-anchor": right ? "start" : "end" }, words))
    this.gap.replaceChildren(...parts)
  }

  #listen() {
    this.svg.addEventListener("pointermove", (event) => this.#hover(event))
    this.svg.addEventListener("pointerleave", () => this.#leave())
    this.svg.addEventListener("keydown", (event) => this.#key(event))
  }

  #hover(event) {
    if (!this.#drawn || event.buttons) return
    const rect = this.root.getBoundingClientRect()
    // The node is drawn zoomed: from the screen's pixels back to the chart's own.
    const x = ((event.clientX - rect.left) * this.#drawn.width) / (rect.width || 1)
    const index = bandAt(this.#places, x)
    if (index >= 0) this.#showTip(index)
  }

  #focusedBar() {
    return this.#bars.findIndex((bar) => bar.group === document.activeElement)
  }

  #leave() {
    const focused = this.#focusedBar()
    if (focused >= 0) this.#showTip(focused)
    else this.#hideTip()
  }

  #key(event) {
    const last = this.#bars.length - 1
    const from = this.#focusedBar()
    const to = { ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1, ArrowUp: from + 1, Home: 0, End: last }
    if (event.key === "Escape" && !this.tip.hidden) this.#hideTip()
    else if (event.key in to && from >= 0) this.#bars[Math.min(last, Math.max(0, to[event.key]))]?.group.focus()
    else return
    event.preventDefault()
    event.stopPropagation() // the canvas has its own use for these keys
  }

  #showTip(index) {
    const { report, width } = this.#drawn ?? {}
    const block = report?.blocks[index]
    const place = this.#places[index]
    if (!block || !place) return this.#hideTip()
    this.#shown = index
    this.#mark(index)
    this.tip.replaceChildren(...blockLines(block, report, this.t).map((line) => html("div", {}, line)))
    this.tip.hidden = false
    const left = place.x + place.width / 2 - this.tip.offsetWidth / 2
    this.tip.style.left = `${Math.max(0, Math.min(width - this.tip.offsetWidth, left))}px`
  }

  #hideTip() {
    this.tip.hidden = true
    this.#shown = -1
    this.#mark(-1)
  }

  #mark(index) {
    this.#bars.forEach((bar, at) => bar.group.toggleAttribute("data-on", at === index))
  }
}

/** Where a block's bar ends: at its peak, or a little beyond the line where the peak is not a number. */
function topOf(block, plot, y) {
  if (block.maxAbs === Infinity) return y(FP16_MAX_LOG2) - OVERSHOOT
  return Number.isFinite(block.maxAbs) && block.maxAbs > 0 ? y(Math.log2(block.maxAbs)) : plot.bottom
}
