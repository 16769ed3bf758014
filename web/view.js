// One node's panel. From the top: the verdict, what it means for the image, what to do about it; then the chart or
// table, the numbers behind it, what ran, and what else there is to say.

import { copy, fileName, save, toJson } from "./actions.js"
import { Chart } from "./chart.js"
import { html, put, putText, svg } from "./dom.js"
import { Table } from "./table.js"
import * as words from "./words.js"

/** Small line drawings for the buttons, on a 16 x 16 field. */
const ICONS = {
  table: "M2.5 3.5h11v9h-11z M2.5 6.5h11 M6.5 3.5v9",
  chart: "M2.5 2.5v11h11 M5.5 11V8 M8.5 11V5 M11.5 11V7",
  copy: "M5.5 5.5h8v8h-8z M10.5 5.5v-3h-8v8h3",
  save: "M8 2.5v7 M5 7l3 3 3-3 M2.5 12.5h11",
  expand: "M3 6l5 5 5-5",
  shrink: "M3 10l5-5 5 5",
}

const icon = (name) =>
  svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }))

/** What a panel is told besides its report; see `PanelView.render`. */
const PLAIN = Object.freeze({ from: "", live: false, reported: false, remedy: null, advanced: null })

export class PanelView {
  #view = null
  #context = PLAIN
  #table = false
  #opened = false // a panel kept small, opened by hand
  #allRemarks = false
  #spoken = ""

  /** `texts` gives t and say; `act` is called with "remedy" or "advanced" when one of the two buttons is pressed. */
  constructor(texts, act = () => {}) {
    this.texts = texts
    this.t = texts.t
    this.advanced = this.#plainButton("moss-advanced", () => act("advanced"))
    this.badge = html("span", { class: "moss-badge" })
    this.state = html("span", { class: "moss-state" })
    this.buttons = {
      table: this.#button("table", () => this.#toggle()),
      copy: this.#button("copy", () => this.#copy()),
      save: this.#button("save", () => save(toJson(this.#view.report), this.#fileName())),
      size: this.#button("expand", () => this.#resize(), "size"),
    }
    const actions = html("span", { class: "moss-actions" }, ...Object.values(this.buttons))
    this.bar = html("div", { class: "moss-progress" }, html("div"))
    this.headline = html("p", { class: "moss-headline" })
    this.remedyText = html("span", { class: "moss-remedy-text" })
    this.remedyButton = this.#plainButton("moss-remedy-button", () => act("remedy"))
    this.remedy = html("p", { class: "moss-remedy" }, this.remedyText, this.remedyButton)
    this.message = html("p", { class: "moss-message" })
    this.chart = new Chart(this.t)
    this.table = new Table(this.t)
    this.plot = html("div", { class: "moss-plot" }, this.chart.root, this.table.root, this.message)
    this.fact = html("p", { class: "moss-fact" })
    this.action = html("p", { class: "moss-action" })
    this.numbers = html("div", { class: "moss-numbers" }, this.fact, this.action)
    this.status = html("p", { class: "moss-status" })
    this.remarks = html("ul", { class: "moss-remarks" })
    this.more = this.#plainButton("moss-more", () => this.#toggleRemarks())
    this.live = html("span", { class: "moss-live", role: "status" })
    const head = html("header", { class: "moss-head" }, this.badge, this.state, actions)
    this.root = html("section", { class: "moss-panel", role: "group" }, this.advanced, head, this.bar, this.headline)
    this.root.append(this.remedy, this.plot, this.numbers, this.status, this.remarks, this.more, this.live)
    this.observer = new ResizeObserver(() => this.#fit())
    this.observe()
    // A selection in here is copied as text; without this ComfyUI would put the selected nodes on the clipboard.
    this.root.addEventListener("copy", (event) => event.stopPropagation())
  }

  /** Follows its own size, until `dispose`. */
  observe() {
    this.observer.observe(this.root)
    this.observer.observe(this.chart.root)
  }

  dispose() {
    this.observer.disconnect()
  }

  /** Whether it has shown anything yet. */
  get shown() {
    return this.#view !== null
  }

  /** Whether it is kept small, as another node shows the same report in full. */
  get small() {
    return this.#context.reported && !this.#opened
  }

  /**
   * Shows a store view. The context says: `from`, another node whose report this is (`live` while it runs); `reported`,
   * a Report node shows this node's runs; `remedy`, {text, button, title} of what to do; `advanced`, the words of the
   * button for the advanced inputs.
   */
  render(view, context = {}) {
    this.#view = view
    this.#context = { ...PLAIN, ...context }
    const { t, root } = this
    const { report, phase } = view
    const verdict = words.verdict(view)
    put(root, "aria-label", t("panel.label"))
    put(root, "data-phase", phase)
    put(root, "data-verdict", verdict)
    root.toggleAttribute("data-small", this.small)
    root.toggleAttribute("data-aside", Boolean(view.aside))
    putText(this.badge, verdict === "none" ? "" : `${words.GLYPHS[verdict]} ${t(`verdict.${verdict}`)}`)
    this.badge.hidden = verdict === "none"
    putText(this.state, this.#stateWords())
    this.#renderProgress()
    this.#line(this.headline, words.headline(view, this.texts))
    this.#renderRemedy()
    this.#line(this.message, this.#messageWords())
    this.#line(this.fact, report ? words.fact(report, t) : "")
    this.#line(this.action, report ? words.action(report, t) : "")
    this.numbers.hidden = !report
    this.#renderStatus()
    this.#renderRemarks()
    this.#renderButtons()
    this.#renderPlot()
    this.#fit()
    this.#speak(verdict)
  }

  /** Says in place of everything else why nothing can be shown. */
  fail(words) {
    for (const part of [this.chart.root, this.table.root, this.headline, this.remedy, this.numbers]) part.hidden = true
    this.plot.hidden = false
    this.#line(this.message, words)
  }

  #line(element, text) {
    putText(element, text)
    element.hidden = text === ""
  }

  #stateWords() {
    const { from, live } = this.#context
    const parts = [words.state(this.#view, this.t)]
    if (from) parts.push(this.t(live ? "panel.live" : "panel.from", { node: from }))
    else if (this.#view.instance) parts.push(this.t("panel.instance", { id: this.#view.instance }))
    return parts.join(" · ")
  }

  #messageWords() {
    const { report, refusal, phase, aside, queued, reporter } = this.#view
    if (refusal) return this.t(refusal)
    if (report) return report.blocks.length === 0 ? this.t("panel.noBlocks") : ""
    if (this.small && phase === "idle" && !aside && !queued) return this.t("panel.small")
    if (aside === "bypassed") return this.t(reporter ? "panel.bypassedReport" : "panel.bypassed")
    if (aside) return this.t("panel.muted")
    if (phase === "waiting" || phase === "running") return this.t("panel.waiting")
    if (queued) return this.t("panel.queued")
    if (phase === "unsampled") return this.t("panel.unsampled")
    if (phase === "failed") return "" // the headline says why
    return this.t(phase === "interrupted" ? "panel.failed" : "panel.idle")
  }

  #renderProgress() {
    const { report, phase } = this.#view
    const share = phase === "running" && report?.totalSteps > 0 ? Math.min(1, report.step / report.totalSteps) : 0
    this.bar.firstChild.style.width = `${Math.round(share * 1000) / 10}%`
  }

  #renderRemedy() {
    const { remedy } = this.#context
    this.remedy.hidden = !remedy
    putText(this.remedyText, remedy?.text ?? "")
    putText(this.remedyButton, remedy?.button ?? "")
    put(this.remedyButton, "title", remedy?.title ?? "")
    this.remedyButton.hidden = !remedy?.button
  }

  #renderStatus() {
    const { report } = this.#view
    const parts = []
    if (report) {
      const setup = words.setup(report, this.t).map((part) => part.replaceAll(" ", "\u00a0")).join(" · ")
      parts.push(html("span", { class: "moss-setup", title: this.t("setup.title") }, setup))
      for (const { text, title, bad } of words.counts(report, this.t)) {
        parts.push(html("span", { class: bad ? "moss-count moss-bad" : "moss-count", title: title || null }, text))
      }
    }
    this.status.replaceChildren(...parts)
    this.status.hidden = parts.length === 0
  }

  #renderRemarks() {
    const lines = words.remarks(this.#view, this.texts)
    this.remarks.replaceChildren(...lines.map(({ text, severity }) => html("li", { "data-severity": severity }, text)))
  }

  #renderButtons() {
    const { report } = this.#view
    const { reported, advanced } = this.#context
    for (const name of ["table", "copy", "save"]) this.buttons[name].disabled = !report
    this.#label("table", this.t(this.#table ? "button.chart" : "button.table"), this.#table ? "chart" : "table")
    this.#label("copy", this.t("button.copy"))
    this.#label("save", this.t("button.save"))
    this.buttons.size.hidden = !reported
    this.#label("size", this.t(this.small ? "button.expand" : "button.shrink"), this.small ? "expand" : "shrink")
    put(this.buttons.size, "aria-expanded", !this.small)
    this.advanced.hidden = !advanced
    putText(this.advanced, advanced?.words ?? "")
    put(this.advanced, "aria-expanded", Boolean(advanced?.open))
  }

  #renderPlot() {
    const { report, refusal } = this.#view
    const drawable = Boolean(report && report.blocks.length > 0)
    const empty = !report && !refusal && !this.small // an axis that shows what will come
    this.chart.root.hidden = !(empty || (drawable && (!this.#table || this.small)))
    this.table.root.hidden = !drawable || !this.#table || this.small
    this.plot.hidden = this.chart.root.hidden && this.table.root.hidden && this.message.hidden
    if (!this.table.root.hidden) this.table.draw(report)
  }

  /** Draws the chart into the present size, and shows as many remarks as there is room for. */
  #fit() {
    if (!this.#view) return
    const items = [...this.remarks.children]
    const show = (n) => {
      items.forEach((item, index) => item.toggleAttribute("hidden", index >= n))
      this.remarks.hidden = n === 0
      const left = items.length - n
      this.#line(this.more, this.#allRemarks && items.length > 1 ? this.t("button.less") : left > 0 ? this.t("button.more", { n: left }) : "")
      put(this.more, "aria-expanded", this.#allRemarks)
    }
    const tooHigh = () => this.root.scrollHeight > this.root.clientHeight + 1
    let shown = this.small && !this.#allRemarks ? 0 : items.length
    show(shown)
    if (!this.#allRemarks) while (shown > 0 && tooHigh()) show(--shown)
    if (!this.chart.root.hidden) this.chart.draw(this.#view.report, this.small)
  }

  /** Tells a screen reader how a run ended, once; not every step of it. */
  #speak(verdict) {
    const { report, phase, promptId } = this.#view
    const ended = phase === "failed" || (report && (phase === "done" || phase === "interrupted"))
    const said = ended ? `${promptId} ${phase} ${verdict}` : ""
    if (!ended || said === this.#spoken) return
    this.#spoken = said
    const lines = [this.badge, this.headline, this.remedyText, this.state, this.fact].map((line) => line.textContent)
    putText(this.live, lines.filter((line) => line).join(this.t("list.sentence")))
  }

  #button(name, act, action = name) {
    const button = html("button", { type: "button", "data-icon": name, "data-action": action }, icon(name))
    button.addEventListener("click", (event) => {
      event.stopPropagation()
      if (action === "size" || this.#view?.report) act()
    })
    return button
  }

  #plainButton(name, act) {
    const button = html("button", { type: "button", class: name, hidden: "" })
    button.addEventListener("click", (event) => {
      event.stopPropagation()
      act()
    })
    return button
  }

  #label(name, label, picture = null) {
    const button = this.buttons[name]
    put(button, "aria-label", label)
    put(button, "title", label)
    if (picture === null || button.dataset.icon === picture) return
    button.dataset.icon = picture
    button.replaceChildren(icon(picture))
  }

  #again() {
    this.render(this.#view, this.#context)
  }

  #toggle() {
    this.#table = !this.#table
    this.#again()
  }

  #resize() {
    this.#opened = !this.#opened
    this.#again()
  }

  #toggleRemarks() {
    this.#allRemarks = !this.#allRemarks
    this.#again()
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
