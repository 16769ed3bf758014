// The same numbers as a table: for screen readers, for reading in full, for copying into a sheet.

import { html } from "./dom.js"
import * as format from "./format.js"
import { GLYPHS } from "./words.js"

const COLUMNS = ["block", "peak", "headroom", "saturated", "clamped", "nonFinite", "over"]

function cells(block, limited) {
  const bits = limited ? format.bits(block.bits) : "–"
  return [format.exact(block.maxAbs), bits, block.saturated, block.clamped, block.nonFinite, block.over].map(String)
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
    this.caption.textContent = this.t("table.caption")
    this.head.replaceChildren(
      ...COLUMNS.map((name) => html("th", { scope: "col" }, this.t(`table.${name}`))),
    )
    this.body.replaceChildren(...report.blocks.map((block) => this.#row(block, report)))
  }

  #row(block, report) {
    const name = html("th", { scope: "row" }, `${GLYPHS[block.level]} ${block.name}`)
    const row = html("tr", { class: `moss-level-${block.level}` }, name)
    row.toggleAttribute("data-nearest", block === report.peak)
    row.append(...cells(block, report.limited).map((value) => html("td", {}, value)))
    return row
  }
}
