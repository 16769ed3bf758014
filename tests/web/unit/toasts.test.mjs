import assert from "node:assert/strict"
import { beforeEach, test } from "node:test"
import { Texts } from "../../../web/i18n.js"
import { Toasts, onPage } from "../../../web/toasts.js"

let page, toasts
beforeEach(() => {
  page = []
  const remove = (toast) => page.splice(page.indexOf(toast), 1)
  toasts = new Toasts(new Texts(), { show: (toast) => page.push(toast), remove })
})
const notice = (kind, rest = {}) => toasts.notice({ node_id: "4", prompt_id: "p1", kind, severity: "warn", text: kind, ...rest })
const shown = () => page.map((toast) => toast.detail)

test("one toast a run: the gravest, whatever came first", () => {
  for (const kind of ["no_fix", "rescue", "out_of_range", "no_fix"]) notice(kind)
  assert.deepEqual(shown(), ["out_of_range"])
  notice("black_image", { severity: "error", sticky: true })
  notice("rescue")
  assert.deepEqual(shown(), ["black_image"])
  notice("no_fix", { prompt_id: "p2" })
  assert.deepEqual(shown(), ["black_image", "no_fix"])
})

test("the black image stays until it is closed, the others go by themselves; the title is the verdict", () => {
  notice("rescue", { severity: "info" })
  assert.deepEqual([page[0].life, page[0].summary], [6000, "Rescued: the image is fine"])
  notice("black_image", { severity: "error", sticky: true })
  assert.deepEqual([page[0].life, page[0].summary, page[0].severity], [undefined, "Image is black or broken", "error"])
})

test("what the title says is not said again", () => {
  const values = { cause: { key: "cause_range", text: "the model left the range" }, remedy: { key: "remedy_fix", text: "Set fix = auto." } }
  notice("black_image", { key: "black_image", values, text: "The image is black or broken: the model left the range. Set fix = auto." })
  assert.deepEqual(shown(), ["Cause: the model left the range. Set fix = auto."])
})

test("a kind that is not known ranks by its severity; without words there is no toast", () => {
  notice("new", { severity: "no such", text: "new" })
  assert.equal(page[0].severity, "info")
  notice("newer", { severity: "error", text: "newer" })
  assert.deepEqual(shown(), ["newer"])
  notice("newest", { prompt_id: "p3", text: "" })
  notice(undefined, { prompt_id: "p4", text: {} })
  assert.equal(page.length, 1)
})

test("memory is bounded", () => {
  for (let i = 0; i < 1000; i++) notice("no_fix", { prompt_id: `p${i}` })
  notice("no_fix", { prompt_id: "p999" })
  assert.equal(page.length, 1000)
})

test("on a frontend with ids and on one without", () => {
  const calls = []
  const note = (name) => (...args) => calls.push([name, ...args])
  const toast = { severity: "warn", summary: "S", detail: "D", life: 5 }
  const newer = onPage(() => ({ warning: note("warning"), dismiss: note("dismiss"), add: note("add") }))
  newer.show(toast, "id")
  newer.remove(toast, "id")
  const older = onPage(() => ({ add: note("add"), remove: note("remove") }))
  older.show(toast, "id")
  older.remove(toast, "id")
  onPage(() => undefined).show(toast, "id")
  assert.deepEqual(calls, [
    ["warning", "S", { id: "id", description: "D", duration: 5, closable: true }], ["dismiss", "id"], ["add", toast], ["remove", toast],
  ])
})
