// The first contact: the template browser, what each template looks like when it is opened, and a node's help.

import assert from "node:assert/strict"
import { after, before, test } from "node:test"
import { CASES } from "../unit/reports.mjs"
import { EXAMPLES, PACK, Page, example, until } from "./comfy.mjs"

let page
before(async () => {
  page = await Page.open({ width: 1700 })
})
after(() => page?.close())

test("the template browser shows both, by name and with a picture of their own", async () => {
  await page.command("Comfy.BrowseTemplates")
  const dialog = page.page.getByRole("dialog")
  await dialog.first().waitFor()
  await dialog.getByText(PACK, { exact: true }).first().click()
  for (const name of Object.values(EXAMPLES)) {
    await dialog.getByText(name, { exact: false }).first().waitFor()
    const picture = dialog.locator(`img[src*="${encodeURIComponent(name)}"], img[src*="${name}"]`).first()
    await until(() => picture.evaluate((img) => img.complete && img.naturalWidth >= 300), `the picture of ${name}`, 30)
  }
  await page.picture("R1-after")
  await page.page.keyboard.press("Escape")
})

for (const name of Object.values(EXAMPLES)) {
  test(`${name}: nothing covers anything, and the report fits`, async () => {
    const ids = await page.workflow(example(name))
    const overlaps = await page.page.evaluate(() => {
      const boxes = window.app.rootGraph.nodes.map((n) => ({ name: n.title, x: n.pos[0], y: n.pos[1] - 30, w: n.size[0], h: n.size[1] + 30 }))
      const frames = window.app.rootGraph.groups.map((g) => ({ name: g.title, x: g.pos[0], y: g.pos[1], w: g.size[0], h: g.size[1] }))
      const meet = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h
      const within = (a, b) => a.x >= b.x && a.y >= b.y && a.x + a.w <= b.x + b.w + 0.5 && a.y + a.h <= b.y + b.h + 0.5
      const bad = []
      boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => meet(a, b) && bad.push([a.name, b.name])))
      for (const box of boxes) for (const frame of frames) if (meet(box, frame) && !within(box, frame)) bad.push([box.name, frame.name])
      return bad
    })
    assert.deepEqual(overlaps, [])
    const [report] = ids.MossFP16Report
    const { workflow } = await page.page.evaluate(() => ({ workflow: window.app.rootGraph.id }))
    for (const id of [ids.MossFP16Loader[0], report]) {
      await page.message("moss_fp16.report", { node_id: id, prompt_id: `t-${name}`, workflow_id: workflow, state: "done", report: CASES.fine })
    }
    await page.command("Comfy.Canvas.FitView")
    await until(() => page.page.evaluate(() => window.app.canvas.ds.scale > 0.2), "the view", 10)
    await page.painted()
    await page.picture(`template-${name.split(" - ")[1].replaceAll(" ", "-")}`)
    const panel = page.panel(report)
    const room = await panel.root.evaluate((root) => root.scrollHeight - root.clientHeight)
    assert.ok(room <= 1, `the report is ${room} px too high`)
  })
}

test("the help opens without a 404, and fits its panel", async () => {
  const missing = []
  page.page.on("response", (response) => {
    if (response.status() === 404 && response.url().includes("/docs/")) missing.push(response.url())
  })
  const ids = await page.workflow(example(EXAMPLES.headless))
  for (const type of ["MossFP16Loader", "MossFP16Report"]) {
    await page.show(ids[type][0])
    await page.select(ids[type][0])
    await page.command("Comfy.Canvas.ToggleHelp").catch(() => {})
    await page.page.locator(".node-help-content").first().waitFor({ timeout: 10_000 }).catch(() => {})
  }
  assert.deepEqual(missing, [])
})

test("nothing went wrong in our files", () => page.assertClean())
