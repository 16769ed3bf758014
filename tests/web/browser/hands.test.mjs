// What hands do with the nodes: resize, bypass, mute, copy and paste, the advanced inputs, a hint in an empty one.

import assert from "node:assert/strict"
import { after, before, describe, test } from "node:test"
import { CASES } from "../unit/reports.mjs"
import { Page, sleep, until } from "./comfy.mjs"

for (const vue of [false, true]) {
  describe(vue ? "Nodes 2.0" : "classic canvas", () => {
    let page, workflow, loader, fix, report, serial
    before(async () => {
      serial = 0
      page = await Page.open({ vue })
      let ids
      ;({ workflow, ids } = await page.place([["MossFP16Loader", 340], ["MossFP16Fix", 340], ["MossFP16Report", 460]]))
      ;[loader, fix, report] = ids
      await page.page.evaluate((ids) => {
        const [loader, fix, report] = ids.map((id) => window.app.rootGraph.getNodeById(Number(id)))
        loader.connect(0, fix, "model")
        fix.connect(0, report, "model")
      }, ids)
    })
    after(() => page?.close())
    const send = (id, given, rest = {}) =>
      page.message("moss_fp16.report", {
        node_id: id, prompt_id: `hands-${++serial}`, workflow_id: workflow, state: "done", report: { ...given, node_id: fix }, ...rest,
      })
    const size = (id) => page.node(id, (node) => [...node.size])
    /** Where on screen a corner of the node is. */
    const corner = (id) =>
      page.node(id, (node, _, app) => {
        const { scale, offset } = app.canvas.ds
        const box = app.canvas.canvas.getBoundingClientRect()
        return [box.left + (node.pos[0] + node.size[0] + offset[0]) * scale, box.top + (node.pos[1] + node.size[1] + offset[1]) * scale]
      })

    test("resized by the mouse, the chart takes the room", async () => {
      await send(report, CASES.fine)
      await page.show(report)
      const chart = page.panel(report).root.locator(".moss-chart")
      const [before, [width]] = [await chart.boundingBox(), await size(report)]
      let [x, y] = await corner(report)
      if (vue) {
        const handle = await page.page.locator(`[data-node-id="${report}"] .cursor-se-resize`).first().boundingBox()
        if (handle) [x, y] = [handle.x + handle.width / 2, handle.y + handle.height / 2]
      } else [x, y] = [x - 4, y - 4]
      await page.page.mouse.move(x, y)
      await page.page.mouse.down()
      for (let i = 1; i <= 8; i++) await page.page.mouse.move(x + i * 15, y + i * 12)
      await page.page.mouse.up()
      await until(async () => (await size(report))[0] > width + 80, `a wider node (${await size(report)})`, 15)
      await until(async () => {
        const now = await chart.boundingBox()
        return now.width > before.width + 80 && now.height > before.height + 40
      }, "a larger chart", 15)
      const drawn = await chart.evaluate((svg) => [svg.viewBox.baseVal.width, svg.clientWidth])
      assert.ok(Math.abs(drawn[0] - drawn[1]) <= 1, `drawn for ${drawn[0]} px, shown at ${drawn[1]}`)
      await page.nodePicture(report, `resized-${vue ? "nodes2" : "classic"}`)
    })

    test("the report node follows the fix node; bypassed, the loader before it", async () => {
      const small = async (id) => (await page.panel(id).root.getAttribute("data-small")) !== null
      await until(async () => (await small(fix)) && !(await small(loader)), "the fix node small", 15)
      await page.select(fix)
      await page.command("Comfy.Canvas.ToggleSelectedNodes.Bypass")
      await until(async () => !(await small(fix)) && (await small(loader)), "the loader small", 15)
      assert.match(await page.panel(fix).state(), /^bypassed/)
      assert.match(await page.panel(fix).text("message"), /passes through unchanged/)
      await send(loader, CASES.fine, { state: "running" })
      assert.match(await page.panel(loader).state(), /^step 20 of 20/)
      await page.command("Comfy.Canvas.ToggleSelectedNodes.Bypass")
      await until(async () => (await small(fix)) && !(await small(loader)), "as before", 15)
      // It was not heard of itself, but the report node has a report of its run.
      assert.equal(await page.panel(fix).state(), "done, 20 steps · from MOSS Saturation Report")
    })

    test("muted, it says so", async () => {
      await page.select(fix)
      await page.command("Comfy.Canvas.ToggleSelectedNodes.Mute")
      await until(async () => /^muted/.test(await page.panel(fix).state()), "muted", 15)
      assert.match(await page.panel(fix).text("message"), /does not run/)
      await page.command("Comfy.Canvas.ToggleSelectedNodes.Mute")
      await until(async () => /^done/.test(await page.panel(fix).state()), "not muted", 15)
    })

    test("a copy of a node with a report starts without one, and the original keeps its own", async () => {
      const panels = () => page.page.locator(".moss-panel").count()
      const before = await panels()
      const said = await page.panel(report).text("headline")
      assert.equal(said, "Image not affected by fp16")
      const copy = await page.page.evaluate((id) => {
        const { canvas, rootGraph: graph } = window.app
        canvas.deselectAll()
        canvas.select(graph.getNodeById(Number(id)))
        canvas.copyToClipboard()
        canvas.pasteFromClipboard()
        return String(Math.max(...graph.nodes.map((n) => Number(n.id))))
      }, report)
      assert.notEqual(copy, report)
      await page.show(copy)
      await until(async () => (await panels()) >= before + 1, "the copy's panel", 15)
      await page.panel(copy).until((s) => s === "idle", "the copy")
      await send(copy, CASES.broken)
      assert.equal(await page.panel(copy).verdict(), "broken")
      await page.show(report)
      assert.equal(await page.panel(report).text("headline"), said)
      await page.page.evaluate((id) => window.app.rootGraph.remove(window.app.rootGraph.getNodeById(Number(id))), copy)
      await until(async () => (await page.panel(copy).root.count()) === 0, "the copy's panel gone", 15)
      await page.command("Comfy.Undo")
      await sleep(100)
      assert.equal(await page.panel(report).text("headline"), said)
    })

    test("the advanced inputs are out of the way until they are asked for", async () => {
      const rows = () =>
        page.node(loader, (node) => node.widgets.filter((w) => node.getLayoutWidgets().includes(w)).map((w) => w.name).filter((n) => n !== "moss_fp16_panel"))
      await page.show(loader)
      const panel = page.panel(loader)
      if (vue) {
        assert.equal(await panel.shows("advanced"), false) // Nodes 2.0 has a button of its own
        await page.page.getByText("Show advanced inputs").first().waitFor()
        return
      }
      assert.deepEqual(await rows(), ["model_name", "compute_dtype", "fix", "guard"])
      const button = panel.root.locator(".moss-advanced")
      const advanced = await page.node(loader, (node) => node.widgets.filter((w) => w.options.advanced).length)
      assert.ok(advanced >= 13, `${advanced} advanced inputs`)
      assert.equal(await button.textContent(), `Show advanced inputs (${advanced})`)
      const [, closed] = await size(loader)
      await page.nodePicture(loader, "R7-after-closed")
      await button.click()
      assert.equal((await rows()).length, 4 + advanced, `${await rows()}`)
      assert.ok((await size(loader))[1] > closed + 200)
      await page.show(loader, { zoom: 0.8 })
      await page.picture("R7-after-open")
      const hints = await page.node(loader, (node) => {
        const of = (name) => node.widgets.find((w) => w.name === name)
        return [of("c")._displayValue, of("c").value, of("param_dtypes").element.placeholder, of("param_dtypes").computedHeight]
      })
      assert.deepEqual(hints.slice(0, 3), ["auto (1/16)", "", "param_dtypes, such as layers.*.proj.o.weight = fp32"])
      assert.ok(hints[3] <= 48, `param_dtypes is ${hints[3]} px high`)
      await page.set(loader, { c: "1/64" })
      await button.click()
      await until(async () => (await button.textContent()) === `Show advanced inputs (${advanced}, 1 changed)`, "the count of changes", 15)
      assert.ok(Math.abs((await size(loader))[1] - closed) <= 16, `the node is as high as before: ${closed}, now ${await size(loader)}`)
      const { output } = await page.page.evaluate(async () => JSON.parse(JSON.stringify(await window.app.graphToPrompt())))
      assert.equal(output[loader].inputs.c, "1/64")
      assert.equal(output[loader].inputs.param_dtypes, "")
    })

    test("nothing went wrong in our files", () => page.assertClean())
  })
}
