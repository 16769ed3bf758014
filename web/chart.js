// The chart: one bar per block on a log2 axis under the fp16 maximum. The gap to the line is the headroom in bits.

import { html, put, putText, svg } from "./dom.js"
import * as format from "./format.js"
import { textBlocks } from "./report.js"
import { FP16_MAX_LOG2, axis, bandAt, bands, project } from "./scale.js"
import { blockLines } from "./words.js"

// The room above the axis holds the limit's label and the bars that overflowed.
const MARGIN = { left: 27, right: 6, top: 14, bottom: 15 }
let serial = 0

/** A mark above the bar, so that a level is told by its shape too. Drawn around (0, 0), growing upwards. */
const MARKS = {
  close: "M0,-5 L2.5,-2.5 L0,0 L-2.5,-2.5 Z",
  tight: "M0,-5.5 L3.2,0 L-3.2,0 Z",
  over: "M-2.6,-5.6 L2.6,-0.4 M2.6,-5.6 L-2.6,-0.4",
  wide: "M0,-5.5 L2.7,-2.7 L0,0 L-2.7,-2.7 Z",
}

function hatch(id, name) {
  const pattern = { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }
  return svg(
    "pattern",
    pattern,
    svg("rect", { width: 4, height: 4, class: `moss-fill-${name}` }),
    svg("rect", { width: 1.4, height: 4, class: "moss-hatch" }),
  )
}

export class Chart {
  #bars = []
  #places = []
  #shown = -1
  #drawn = null

  constructor(t) {
    this.t = t
    const id = `moss-${++serial}`
    this.ids = { tight: `${id}-tight`, over: `${id}-over` }
    const defs = svg("defs", {}, hatch(this.ids.tight, "tight"), hatch(this.ids.over, "over"))
    this.grid = svg("g", { class: "moss-grid", "aria-hidden": "true" })
    this.danger = svg("rect", { class: "moss-danger" })
    this.barGroup = svg("g", { class: "moss-bars" })
    this.limit = svg("line", { class: "moss-limit" })
    this.limitLabel = svg("text", { class: "moss-limit-label" })
    this.gap = svg("g", { class: "moss-gap", "aria-hidden": "true" })
    this.svg = svg("svg", { role: "group", class: "moss-chart" }, defs, this.danger, this.grid, this.barGroup, this.limit)
    this.svg.append(this.limitLabel, this.gap)
    this.tip = html("div", { class: "moss-tip", role: "tooltip", hidden: "" })
    this.root = html("div", { class: "moss-chart-box" }, this.svg, this.tip)
    this.#listen()
  }

  /** Draws the report into the box's present size. Bars are kept, so the keyboard's place is too. */
  draw(report) {
    const width = this.root.clientWidth
    const height = this.root.clientHeight
    if (width < 40 || height < 30) return
    this.#drawn = { report, width, height }
    put(this.svg, "viewBox", `0 0 ${width} ${height}`)
    put(this.svg, "aria-label", this.t("chart.label"))
    const plot = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom }
    const scale = axis(report.blocks.map((block) => block.maxAbs))
    const y = (log2) => project(log2, scale.low, scale.high, plot.bottom, plot.top)
    const leading = textBlocks(report.blocks)
    const groups = [leading, report.blocks.length - leading]
    this.#places = bands(groups, plot.right - plot.left).map((p) => ({ ...p, x: p.x + plot.left }))
    this.#drawGrid(plot, scale, y, groups)
    this.#drawLimit(plot, y)
    this.#drawBars(report, plot, y)
    this.#drawGap(report, plot, y)
    if (this.#shown >= 0) this.#showTip(this.#shown)
  }

  #drawGrid(plot, scale, y, groups) {
    const parts = []
    let below = plot.bottom + 20
    for (const tick of scale.ticks) {
      const at = y(tick)
      parts.push(svg("line", { x1: plot.left, x2: plot.right, y1: at, y2: at }))
      const nearLimit = Math.abs(at - y(FP16_MAX_LOG2)) < 11
      if (below - at < 11 || nearLimit) continue
      parts.push(svg("text", { x: plot.left - 3, y: at + 3, "text-anchor": "end" }, format.powerOfTwo(tick)))
      below = at
    }
    parts.push(svg("text", { x: plot.left - 3, y: y(FP16_MAX_LOG2) + 3, "text-anchor": "end" }, format.powerOfTwo(16)))
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

  #drawLimit(plot, y) {
    const at = y(FP16_MAX_LOG2)
    for (const [name, value] of Object.entries({ x1: plot.left, x2: plot.right, y1: at, y2: at })) {
      put(this.limit, name, value)
    }
    const area = { x: plot.left, y: 0, width: plot.right - plot.left, height: Math.max(0, at) }
    for (const [name, value] of Object.entries(area)) put(this.danger, name, value)
    put(this.limitLabel, "x", plot.left + 3)
    put(this.limitLabel, "y", at - 3)
    putText(this.limitLabel, this.t("chart.limit"))
  }

  #drawBars(report, plot, y) {
    while (this.#bars.length > report.blocks.length) this.#bars.pop().group.remove()
    while (this.#bars.length < report.blocks.length) this.#bars.push(this.#newBar(this.#bars.length))
    report.blocks.forEach((block, index) => {
      const bar = this.#bars[index]
      const place = this.#places[index]
      const finite = Number.isFinite(block.maxAbs)
      const top = block.maxAbs === Infinity ? 2 : finite && block.maxAbs > 0 ? y(Math.log2(block.maxAbs)) : plot.bottom
      const gap = Math.min(2, place.width * 0.18)
      put(bar.rect, "x", place.x + gap / 2)
      put(bar.rect, "width", Math.max(0.5, place.width - gap))
      put(bar.rect, "y", top)
      put(bar.rect, "height", Math.max(0.75, plot.bottom - top))
      put(bar.group, "class", `moss-bar moss-level-${block.level}`)
      const pattern = this.ids[block.level]
      bar.rect.style.fill = pattern && place.width > 7 ? `url(#${pattern})` : ""
      put(bar.mark, "d", MARKS[block.level] ?? "")
      put(bar.mark, "transform", `translate(${place.x + place.width / 2} ${Math.max(7, top - 1.5)})`)
      put(bar.group, "aria-label", blockLines(block, report.limited, this.t).join(", "))
    })
    // One tab stop for all bars: the one that has the focus, else the one nearest to overflow.
    const focused = this.#focusedBar()
    const stop = Math.max(0, focused >= 0 ? focused : report.blocks.indexOf(report.peak))
    this.#bars.forEach((bar, index) => put(bar.group, "tabindex", index === stop ? 0 : -1))
  }

  #newBar(index) {
    const rect = svg("rect")
    const mark = svg("path", { class: "moss-mark" })
    const group = svg("g", { role: "img", tabindex: -1 }, rect, mark)
    group.addEventListener("focus", () => this.#showTip(index))
    group.addEventListener("blur", () => this.#hideTip())
    this.barGroup.append(group)
    return { group, rect, mark }
  }

  /** A measure from the highest bar to the line, with the bits written beside it. */
  #drawGap(report, plot, y) {
    const index = report.blocks.indexOf(report.peak)
    const block = report.peak
    if (index < 0 || !block || block.maxAbs === 0) return this.gap.replaceChildren()
    const place = this.#places[index]
    const x = place.x + place.width / 2
    const over = block.maxAbs === Infinity
    const top = over ? 2 : y(Math.log2(block.maxAbs))
    const line = y(FP16_MAX_LOG2)
    const words = over ? this.t("chart.overflow") : this.t("chart.bits", { bits: format.bits(block.bits) })
    const parts = []
    if (!over && Math.abs(top - line) > 3) {
      parts.push(svg("line", { x1: x, x2: x, y1: top, y2: line }))
      for (const end of [top, line]) parts.push(svg("line", { x1: x - 3, x2: x + 3, y1: end, y2: end }))
    }
    const room = words.length * 6 + 8
    const right = x + 6 + room < plot.right
    const middle = over ? line + 11 : Math.min(plot.bottom - 4, (top + line) / 2 + 3.5)
    const at = { x: right ? x + 7 : x - 7, y: Math.max(middle, line + 11), "text-anchor": right ? "start" : "end" }
    parts.push(svg("text", at, words))
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
    this.tip.replaceChildren(...blockLines(block, report.limited, this.t).map((line) => html("div", {}, line)))
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
