// Reports of every shape, handed to the page as if the server had sent them: shown or refused in words.

import assert from "node:assert/strict"
import { after, before, test } from "node:test"
import { block, message, remedy, report } from "../unit/reports.mjs"
import { Page } from "./comfy.mjs"

let page, workflow, id, panel
before(async () => {
  page = await Page.open()
  ;({ workflow, ids: [id] } = await page.place([["MossFP16Fix", 320]]))
  await page.show(id)
  panel = page.panel(id)
})
after(() => page?.close())

let run = 0
const send = (given, rest = {}) =>
  page.message("moss_fp16.report", {
    node_id: id, prompt_id: `run-${++run}`, workflow_id: workflow, state: "done", report: given, ...rest,
  })

test("idle says what the panel is for", async () => {
  assert.equal(await panel.state(), "idle")
  assert.match(await panel.text("message"), /Queue the workflow/)
})

test("what is no report is refused in words", async () => {
  for (const [given, words] of [
    [null, /not a report/], [[1], /not a report/], [{}, /not a saturation report/],
    [{ schema: "moss_fp16.report/1" }, /no list of blocks/], [{ schema: "moss_fp16.report/3" }, /newer schema/],
  ]) {
    await send(given)
    assert.match(await panel.text("message"), words)
    assert.equal(await panel.root.locator(".moss-actions button:enabled:visible").count(), 0)
  }
})

test("a newer schema, missing fields, 0 and 200 blocks are shown", async () => {
  await send(report({ schema: "moss_fp16.report/2" }))
  assert.match(await panel.text("remarks"), /newer schema/)
  assert.equal(await panel.bars().count(), 4)
  await send({ schema: "moss_fp16.report/1", blocks: [{ name: "layer.0", max_abs: 12 }] })
  assert.match(await panel.text("fact"), /^largest value 12 in layer\.0 · margin 12\.4 bits/)
  assert.match(await panel.text("badge"), /Not measured/) // it names no outcome, and the page makes up none
  await send(report({ blocks: [] }))
  assert.match(await panel.text("message"), /no blocks/)
  await send(report({ blocks: Array.from({ length: 200 }, (_, i) => block(`layer.${i}`, i + 1)) }))
  assert.equal(await panel.bars().count(), 200)
  assert.match(await panel.text("fact"), /^largest value 200 in layer\.199/)
})

test("NaN and Infinity are named", async () => {
  for (const bad of [NaN, Infinity, null, "NaN"]) {
    await send(report({ blocks: [block("layer.0", 10), block("layer.1", bad)] }))
    assert.equal(await panel.text("fact"), "NaN or infinity in layer.1")
  }
})

test("markup in any text stays text", async () => {
  const evil = `<img src=x onerror="window.__moss = 1"><b>bold</b>`
  await send(
    report({
      mode: evil, engine: evil, compute_dtype: evil, messages: [message(evil)], blocks: [block(evil, 50)], outcome: "broken",
      rescues: [{ step: evil, rung: evil, reason: evil }], self_check: { result: evil, detail: evil },
      remedy: remedy({ text: evil, action: { input: evil, value: evil } }), verdict: { values: { cause: message(evil) } },
    }),
  )
  await panel.bars().first().focus()
  await panel.click("table")
  assert.ok((await panel.root.textContent()).includes("<b>bold</b>"))
  assert.equal(await panel.root.locator("img, b, script").count(), 0)
  assert.equal(await page.page.evaluate(() => window.__moss), undefined)
  await panel.click("table")
})

test("messages for unknown nodes and runs change nothing", async () => {
  await send(report())
  const before = await panel.root.textContent()
  for (const detail of [null, 7, {}, { node_id: "999", prompt_id: "x", workflow_id: workflow, report: report() }]) {
    await page.message("moss_fp16.report", detail)
    await page.message("moss_fp16.notice", detail)
  }
  await send(report({ mode: "other" }), { workflow_id: "another workflow" })
  await send(report({ mode: "script" }), { workflow_id: null })
  assert.equal(await panel.root.textContent(), before)
})

test("a panel that cannot be painted says so and keeps no other from being painted", async () => {
  const { workflow, ids } = await page.place([["MossFP16Fix", 320], ["MossFP16Loader", 320], ["MossFP16Report", 320]])
  const to = (id, given) => page.message("moss_fp16.report", { node_id: id, prompt_id: "all", workflow_id: workflow, state: "done", report: given })
  await page.node(ids[0], (node) => {
    Object.defineProperty(node, "mode", { configurable: true, get() { throw new Error("boom") } })
  })
  for (const id of ids) await to(id, report())
  assert.match(await page.panel(ids[0]).text("message"), /could not be drawn: Error: boom/)
  for (const id of ids.slice(1)) assert.match(await page.panel(id).text("badge"), /OK/)
  assert.ok(page.messages.some((line) => /could not be painted/.test(line)))
  page.messages = page.messages.filter((line) => !/could not be painted/.test(line))
  await page.node(ids[0], (node) => {
    delete node.mode
  })
  await to(ids[0], report({ mode: "weights" }))
})

test("toasts: one a run, the gravest; as text", async () => {
  const notice = { node_id: id, prompt_id: "t1", kind: "rescue", severity: "warn", text: "Step 4 was <b>rescued</b>." }
  await page.message("moss_fp16.notice", { ...notice, text: "A script's run." })
  for (const id of ["t1", "t2"]) await page.message("execution_start", { prompt_id: id })
  for (let i = 0; i < 3; i++) await page.message("moss_fp16.notice", notice)
  const toasts = page.page.locator("[data-testid='toast']")
  await toasts.first().waitFor()
  assert.equal(await toasts.count(), 1)
  assert.match(await toasts.first().innerText(), /^Rescued: the image is fine\s+Step 4 was <b>rescued<\/b>\.$/)
  await page.message("moss_fp16.notice", { ...notice, kind: "black_image", severity: "error", text: "Set fix = auto.", sticky: true })
  await page.page.waitForFunction(() => [...document.querySelectorAll("[data-testid=toast]")].map((e) => e.innerText).join().match(/^Image is black or broken\s+Set fix = auto\.$/))
  await page.message("moss_fp16.notice", notice)
  await page.message("moss_fp16.notice", { ...notice, prompt_id: "t2", severity: "no such" })
  await page.page.waitForFunction(() => document.querySelectorAll("[data-testid=toast]").length === 2)
})

test("nothing went wrong in our files", () => page.assertClean())
