// Nodes that become part of a subgraph, by the command a user has: their panels, and every panel after that.

import assert from "node:assert/strict"
import { after, before, describe, test } from "node:test"
import { EXAMPLES, Page, example, getJson, until } from "./comfy.mjs"

const values = (steps, seed) => ({
  MossFP16Loader: { model_name: "hot.safetensors", compute_dtype: "fp16", self_check: false },
  EmptyFlux2LatentImage: { width: 64, height: 64 },
  KSampler: { steps, seed },
})

/** A Fix node between the loader and everything that used its MODEL. */
const addFix = (page) =>
  page.page.evaluate(() => {
    const graph = window.app.rootGraph
    const of = (type) => graph.nodes.find((n) => n.type === type)
    const fix = window.LiteGraph.createNode("MossFP16Fix")
    fix.pos = [400, 800]
    graph.add(fix)
    fix.widgets.find((w) => w.name === "self_check").value = false
    of("MossFP16Loader").connect(0, fix, "model")
    for (const type of ["KSampler", "MossFP16Report"]) fix.connect(0, of(type), "model")
    return String(fix.id)
  })

for (const vue of [false, true]) {
  describe(vue ? "Nodes 2.0" : "classic canvas", () => {
    let page
    let seed = vue ? 4100 : 3100
    before(async () => {
      page = await Page.open({ vue })
    })
    after(() => page?.close())

    /** Makes a subgraph of the node, as the command does, and returns the execution id of what is in it. */
    async function convert(nodeId, type) {
      await page.select(nodeId)
      await page.command("Comfy.Graph.ConvertToSubgraph")
      return until(
        () =>
          page.page.evaluate((type) => {
            for (const outer of window.app.rootGraph.nodes) {
              const inner = outer.subgraph?.nodes.find((n) => n.type === type)
              if (inner) return [String(outer.id), String(inner.id)]
            }
            return null
          }, type),
        "the subgraph",
      )
    }
    const enter = (outer) =>
      page.page.evaluate((outer) => {
        const { rootGraph: graph, canvas } = window.app
        const node = graph.getNodeById(Number(outer)) ?? graph.getNodeById(outer)
        canvas.openSubgraph(node.subgraph, node)
      }, outer)

    for (const [type, fixed] of [["MossFP16Report", false], ["MossFP16Loader", false], ["MossFP16Fix", true]]) {
      test(`${type}: the run is shown inside, what is left outside follows it`, async () => {
        const ids = await page.workflow(example(EXAMPLES.headless), values(4, ++seed))
        if (fixed) ids.MossFP16Fix = [await addFix(page)]
        const [outer, inner] = await convert(ids[type][0], type)
        const prompt = await page.queue()
        await page.history(prompt)
        assert.equal((await getJson(`/moss_fp16/reports/${outer}:${inner}`)).prompt_id, prompt)
        const outside = type === "MossFP16Report" ? ids.MossFP16Loader[0] : ids.MossFP16Report[0]
        await page.show(outside)
        assert.equal(await page.panel(outside).until((s) => s.startsWith("done"), "outside"), "done, 4 steps")
        // Through the wall of the subgraph, too, the loader is known to have a report node.
        if (type === "MossFP16Report") assert.equal(await page.panel(outside).root.getAttribute("data-small"), "")
        await enter(outer)
        await until(() => page.panel(inner).root.isVisible(), "the panel inside")
        await page.show(inner)
        const panel = page.panel(inner)
        assert.equal(await panel.until((s) => s.startsWith("done"), "inside"), "done, 4 steps")
        assert.equal(await panel.text("headline"), "Image not affected by fp16")
        await page.nodePicture(inner, `S1-after-${vue ? "nodes2" : "classic"}-${type}`)
      })

      test(`${type}: a workflow opened after that has panels that live`, async () => {
        const ids = await page.workflow(example(EXAMPLES.headless), values(3, ++seed))
        await page.show(ids.MossFP16Report[0])
        const panel = page.panel(ids.MossFP16Report[0])
        await panel.until((s) => s === "idle", "the new workflow")
        assert.match(await panel.text("message"), /Queue the workflow/)
        await page.history(await page.queue())
        assert.equal(await panel.until((s) => s.startsWith("done"), "the new workflow's run"), "done, 3 steps")
        if (type === "MossFP16Report") await page.picture(`S1-after-${vue ? "nodes2" : "classic"}-next-workflow`)
      })
    }

    test("nothing went wrong in our files", () => page.assertClean())
  })
}
