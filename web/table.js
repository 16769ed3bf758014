// The same numbers as a table: for screen readers, for reading in full, for copying into a sheet.

import { html } from "./dom.js"
import * as format from "./format.js"
import { GLYPHS } from "./words.js"

/** The columns that say nothing where every block has 0 in them, the worst first. */
const COUNTS = ["nonFinite", "saturated", "clamped", "over"]

/** The columns of counts that a report fills; in a wider stream nothing saturates. */
export function countColumns(report) {
  const filled = (name) => report.blocks.some((block) => block[name] > 0)
  return COUNTS.filter((name) => filled(name) && (report.limited || name !== "saturated"))
}

export class Table {
  constructor(t) {
    this.t = t
    this.caption = html("caption")
    this.head = html("tr")
    this.body = html("tbody")
    this.table = html("table", {}, this.caption, html("thead", {}, this.head), this.body)
    this.root = html("div", { class: "moss-table", tabindex: 0, hidden: "" }, this.table)
  }

  draw(report) {
    const counted = countColumns(report)
    const threshold = format.exact(report.threshold)
    this.caption.textContent = this.t("table.caption")
    this.head.replaceChildren(
      ...["block", "peak", "headroom", ...counted].map((name) => html("th", { scope: "col" }, this.t(`table.${name}`, { threshold }))),
    )
    this.body.replaceChildren(...report.blocks.map((block) => this.#row(block, report, counted)))
  }

  #row(block, report, counted) {
    const name = html("th", { scope: "row" }, `${GLYPHS[block.level]} ${block.name}`)
    const row = html("tr", { class: `moss-level-${block.level}` }, name)
    row.toggleAttribute("data-nearest", block === report.peak)
    const numbers = [format.exact(block.maxAbs), report.limited ? format.bits(block.bits) : "–"]
    row.append(...[...numbers, ...counted.map((name) => format.grouped(block[name]))].map((value) => html("td", {}, value)))
    return row
  }
}
