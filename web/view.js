// One node's panel: the verdict, the sentence that names the block nearest to overflow, the chart or table, the status.

import { copy, fileName, save, toJson } from "./actions.js"
import { Chart } from "./chart.js"
import { html, put, putText, svg } from "./dom.js"
import * as format from "./format.js"
import { Table } from "./table.js"
import * as words from "./words.js"

/** Small line drawings for the buttons, on a 16 x 16 field. */
const ICONS = {
  table: "M2.5 3.5h11v9h-11z M2.5 6.5h11 M6.5 3.5v9",
  chart: "M2.5 2.5v11h11 M5.5 11V8 M8.5 11V5 M11.5 11V7",
  copy: "M5.5 5.5h8v8h-8z M10.5 5.5v-3h-8v8h3",
  save: "M8 2.5v7 M5 7l3 3 3-3 M2.5 12.5h11",
}

const icon = (name) =>
  svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }))

export class PanelView {
  #view = null
  #table = false
  #spoken = ""

  constructor(t) {
    this.t = t
    this.badge = html("span", { class: "moss-badge" })
    this.state = html("span", { class: "moss-state" })
    this.buttons = {
      table: this.#button("table", () => this.#toggle()),
      copy: this.#button("copy", () => this.#copy()),
      save: this.#button("save", () => save(toJson(this.#view.report), this.#fileName())),
    }
    const actions = html("span", { class: "moss-actions" }, ...Object.values(this.buttons))
    this.bar = html("div", { class: "moss-progress" }, html("div"))
    this.headline = html("p", { class: "moss-headline" })
    this.action = html("p", { class: "moss-action" })
    this.message = html("p", { class: "moss-message" })
    this.chart = new Chart(t)
    this.table = new Table(t)
    this.plot = html("div", { class: "moss-plot" }, this.message, this.chart.root, this.table.root)
    this.status = html("p", { class: "moss-status" })
    this.remarks = html("ul", { class: "moss-remarks" })
    this.live = html("span", { class: "moss-live", role: "status" })
    const head = html("header", { class: "moss-head" }, this.badge, this.state, actions)
    this.root = html("section", { class: "moss-panel", role: "group" }, head, this.bar, this.headline, this.action)
    this.root.append(this.plot, this.status, this.remarks, this.live)
    this.observer = new ResizeObserver(() => this.#drawChart())
    this.observer.observe(this.chart.root)
    // A selection in here is copied as text; without this ComfyUI would put the selected nodes on the clipboard.
    this.root.addEventListener("copy", (event) => event.stopPropagation())
  }

  dispose() {
    this.observer.disconnect()
  }

  /** Shows a store view; `from` names another node whose live report this is. */
  render(view, from = "") {
    this.#view = view
    const { t, root } = this
    const { report, phase } = view
    const level = report ? words.verdict(report) : "none"
    put(root, "aria-label", t("panel.label"))
    put(root, "data-phase", phase)
    put(root, "data-level", level)
    putText(this.badge, report ? `${words.GLYPHS[level]} ${t(`level.${level}`)}` : "")
    this.badge.hidden = !report
    putText(this.state, this.#stateWords(from))
    this.#renderProgress()
    putText(this.headline, report ? words.headline(report, t, phase === "running") : "")
    putText(this.action, report ? words.action(report, t) : "")
    putText(this.message, this.#messageWords())
    this.#renderStatus()
    this.#renderRemarks()
    this.#renderPlot()
    this.#speak(level)
  }

  #stateWords(from) {
    const parts = [words.state(this.#view, this.t)]
    if (from) parts.push(this.t("panel.source", { node: from }))
    else if (this.#view.instance) parts.push(this.t("panel.instance", { id: this.#view.instance }))
    return parts.join(" · ")
  }

  #messageWords() {
    const { report, refusal, phase } = this.#view
    if (refusal) return this.t(refusal)
    if (report) return report.blocks.length === 0 ? this.t("panel.noBlocks") : ""
    if (phase === "waiting" || phase === "running") return this.t("panel.waiting")
    if (phase === "unsampled") return this.t("panel.unsampled")
    return this.t(phase === "failed" || phase === "interrupted" ? "panel.failed" : "panel.idle")
  }

  #renderProgress() {
    const { report, phase } = this.#view
    const share = phase === "running" && report?.totalSteps > 0 ? Math.min(1, report.step / report.totalSteps) : 0
    this.bar.firstChild.style.width = `${Math.round(share * 1000) / 10}%`
  }

  #renderStatus() {
    const { report } = this.#view
    const parts = []
    if (report) {
      parts.push(html("span", { class: "moss-setup" }, words.setup(report).join(" · ")))
      for (const { key, value, bad } of words.counts(report)) {
        const name = bad ? "moss-count moss-bad" : "moss-count"
        parts.push(html("span", { class: name, title: value }, `${this.t(key)} ${format.count(value)}`))
      }
    }
    this.status.replaceChildren(...parts)
  }

  #renderRemarks() {
    const lines = words.remarks(this.#view, this.t)
    this.remarks.replaceChildren(...lines.map((line) => html("li", {}, line)))
    this.remarks.hidden = lines.length === 0
  }

  #renderPlot() {
    const { report } = this.#view
    const drawable = Boolean(report && report.blocks.length > 0)
    this.message.hidden = drawable
    this.chart.root.hidden = !drawable || this.#table
    this.table.root.hidden = !drawable || !this.#table
    for (const button of Object.values(this.buttons)) button.disabled = !report
    if (this.buttons.table.dataset.icon !== (this.#table ? "chart" : "table")) {
      this.buttons.table.dataset.icon = this.#table ? "chart" : "table"
      this.buttons.table.replaceChildren(icon(this.buttons.table.dataset.icon))
    }
    this.#label("table", this.t(this.#table ? "button.chart" : "button.table"))
    this.#label("copy", this.t("button.copy"))
    this.#label("save", this.t("button.save"))
    if (!drawable) return
    if (this.#table) this.table.draw(report)
    else this.#drawChart()
  }

  #drawChart() {
    const report = this.#view?.report
    if (report && report.blocks.length > 0 && !this.chart.root.hidden) this.chart.draw(report)
  }

  /** Tells a screen reader how a run ended, once; not every step of it. */
  #speak(level) {
    const { report, phase, promptId } = this.#view
    const ended = report && (phase === "done" || phase === "failed" || phase === "interrupted")
    const said = ended ? `${promptId} ${phase} ${level}` : ""
    if (!ended || said === this.#spoken) return
    this.#spoken = said
    putText(this.live, [this.state.textContent, this.headline.textContent, this.action.textContent].join(". "))
  }

  #button(name, act) {
    const button = html("button", { type: "button", "data-icon": name, "data-action": name }, icon(name))
    button.addEventListener("click", (event) => {
      event.stopPropagation()
      if (this.#view?.report) act()
    })
    return button
  }

  #label(name, label) {
    put(this.buttons[name], "aria-label", label)
    put(this.buttons[name], "title", label)
  }

  #toggle() {
    this.#table = !this.#table
    this.#renderPlot()
  }

  #fileName() {
    return fileName(this.#view.report, this.#view.promptId)
  }

  async #copy() {
    const copied = await copy(toJson(this.#view.report))
    putText(this.live, this.t(copied ? "button.copied" : "button.copyFailed"))
    this.buttons.copy.dataset.done = copied ? "yes" : "no"
    this.#label("copy", this.live.textContent)
    setTimeout(() => {
      delete this.buttons.copy.dataset.done
      this.#label("copy", this.t("button.copy"))
    }, 1500)
  }
}
