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
  for (const name of Object.values(EXAMPLES)) await dialog.getByText(name).first().waitFor()
  // ComfyUI's own picture in their place is another size.
  const pictures = () => dialog.locator("img").evaluateAll((list) => list.map((img) => `${img.naturalWidth} x ${img.naturalHeight}`))
  await until(async () => (await pictures()).filter((size) => size === "640 x 640").length === 2, "two pictures", 30)
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

test("the help opens without a 404, begins with the remedy, and fits its panel", async () => {
  const missing = []
  page.page.on("response", (response) => {
    if (response.status() === 404 && response.url().includes("/docs/")) missing.push(response.url())
  })
  const ids = await page.workflow(example(EXAMPLES.headless))
  const tab = page.page.getByTestId("panel-tab-info")
  for (const [type, locale, first] of [["MossFP16Loader", "en", /^Black image\? Leave fix = auto/], ["MossFP16Report", "zh", /^图像全黑？/]]) {
    await page.page.evaluate((locale) => window.app.extensionManager.setting.set("Comfy.Locale", locale), locale)
    await page.show(ids[type][0])
    await page.select(ids[type][0])
    if (!(await tab.isVisible())) await page.page.locator("button[aria-label='Toggle properties panel']").first().click()
    await tab.click()
    const help = page.page.locator(".node-help-content")
    await until(async () => first.test(await help.locator("p").first().innerText().catch(() => "")), `the help of ${type}`, 30)
    const wide = await help.evaluate((root) => [...root.querySelectorAll("*")].filter((e) => e.scrollWidth > root.clientWidth + 1).map((e) => e.tagName))
    assert.deepEqual(wide, [])
    await page.picture(`R11-after-${locale}`)
  }
  assert.deepEqual(missing, [])
})

test("nothing went wrong in our files", () => page.assertClean())
