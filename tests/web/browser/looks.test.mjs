// How the panel reads: both canvases, both themes, 220 and 600 px, zoomed out; by pointer and by keyboard.

import assert from "node:assert/strict"
import { after, before, describe, test } from "node:test"
import { block, report } from "../unit/reports.mjs"
import { Page, sleep } from "./comfy.mjs"

/** A run of the shipped model's shape: two text blocks, 42 joint blocks, the peak at layer 22. */
function run(peak, rest = {}) {
  const layer = (i) => Math.fround(peak * (0.02 + 0.98 * Math.exp(-(((i - 22) / 8) ** 2))))
  const layers = Array.from({ length: 42 }, (_, i) =>
    layer(i) > 65504 ? block(`layer.${i}`, null, { over: 9, saturated: 6, non_finite: 3 }) : block(`layer.${i}`, layer(i)),
  )
  return report({ blocks: [block("text.0", 56), block("text.1", 112), ...layers], total_steps: 20, step: 20, ...rest })
}

const CASES = {
  fixed: run(3904),
  rescued: run(31000, {
    rescues: [{ step: 4, sigma: 0.71, rung: "online, c 1/2", reason: "layer.22 saturated" }],
    factors: { c: 0.5, s_attn: 1, s_ffn: 1 },
  }),
  overflow: run(2e5, { mode: "none", factors: { c: 1, s_attn: 1, s_ffn: 1 }, warnings: ["fp16 without a fix: expect overflow."] }),
}
const HEADLINES = {
  fixed: "layer.22 peaks 3904 · 4.1 bits of headroom",
  rescued: "layer.22 peaks 3.1e4 · 1.1 bits of headroom",
  overflow: "layer.14 and 16 more overflowed: values that are not finite",
}

/** Colours of an element against the panel's ground: the WCAG contrast. */
const contrast = (locator) =>
  locator.evaluate((element) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d")
    const luminance = (colour) => {
      canvas.fillStyle = colour
      canvas.fillRect(0, 0, 1, 1)
      const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => {
        const s = v / 255
        return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4
      })
      return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const style = getComputedStyle(element)
    const ink = !(element instanceof SVGElement) ? style.color : style.fill === "none" ? style.stroke : style.fill
    const pair = [luminance(ink), luminance(getComputedStyle(element.closest(".moss-panel")).backgroundColor)]
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)
  })

for (const vue of [false, true]) {
  for (const dark of [true, false]) {
    describe(`${vue ? "Nodes 2.0" : "classic canvas"}, ${dark ? "dark" : "light"} theme`, () => {
      const name = (rest) => `${vue ? "nodes2" : "classic"}-${dark ? "dark" : "light"}-${rest}`
      let page, workflow, ids
      before(async () => {
        page = await Page.open({ vue, dark })
        ;({ workflow, ids } = await page.place([["MossFP16Fix", 220], ["MossFP16Loader", 300], ["MossFP16Report", 600]]))
      })
      after(() => page?.close())
      const send = (id, given) =>
        page.message("moss_fp16.report", {
          node_id: id, prompt_id: `run-${Math.random()}`, workflow_id: workflow, state: "done", report: given,
        })

      for (const [which, given] of Object.entries(CASES)) {
        test(`${which}: the verdict, the block and what was done, at every width`, async () => {
          for (const id of ids) await send(id, given)
          for (const [id, width] of [[ids[0], 220], [ids[2], 600]]) {
            await page.show(id)
            const panel = page.panel(id)
            assert.equal(await panel.text("headline"), HEADLINES[which])
            assert.ok((await panel.text("action")).length > 5)
            assert.equal(await panel.bars().count(), 44)
            const box = await panel.root.boundingBox()
            assert.ok(Math.abs(box.width - width) < 50, `${box.width} for a node of ${width}`)
            const chart = await panel.root.locator(".moss-chart").boundingBox()
            assert.ok(chart.height >= 80 && chart.width > box.width - 30, JSON.stringify(chart))
            await fits(panel, width)
            for (const part of [".moss-badge", ".moss-headline", ".moss-action", ".moss-state", ".moss-limit-label"]) {
              const ratio = await contrast(panel.root.locator(part))
              assert.ok(ratio >= 4, `${part}: contrast ${ratio.toFixed(2)}`)
            }
            for (const bar of await panel.root.locator(".moss-bar .moss-mark").all()) {
              if (await bar.getAttribute("d")) assert.ok((await contrast(bar)) >= 3)
            }
            await page.nodePicture(id, name(`${which}-${width}`))
          }
        })
      }

      test("zoomed out, the verdict and the sentence stay, larger", async () => {
        await page.show(ids[1], { zoom: 0.4 })
        const panel = page.panel(ids[2])
        assert.ok(await panel.root.isVisible())
        assert.ok(await panel.root.locator(".moss-headline").isVisible())
        assert.equal(await panel.root.locator(".moss-status").isVisible(), false)
        const size = await panel.root.locator(".moss-badge").evaluate((e) => parseFloat(getComputedStyle(e).fontSize))
        assert.ok(size * 0.4 >= 8, `${size * 0.4} px on screen`)
        await page.picture(name("zoomed-out"))
        await page.show(ids[2])
        assert.ok(await panel.root.locator(".moss-status").isVisible())
      })

      test("numbers by pointer and by keyboard", async () => {
        await send(ids[2], CASES.fixed)
        await page.show(ids[2])
        const panel = page.panel(ids[2])
        const tip = panel.root.locator(".moss-tip")
        await panel.bars().nth(24).hover({ force: true })
        assert.match(await tip.textContent(), /^layer\.22peak \|x\| 39044\.1 bits of headroom$/)
        await page.page.mouse.move(5, 500)
        assert.equal(await tip.isVisible(), false)
        await panel.root.locator("button[data-action='save']").focus()
        await page.page.keyboard.press("Tab") // the bar nearest to overflow is the chart's one tab stop
        const position = () => page.page.evaluate(() => JSON.stringify([window.app.canvas.ds.offset, window.app.rootGraph.nodes.map((n) => [...n.pos])]))
        const canvas = await position()
        assert.match(await tip.textContent(), /^layer\.22/)
        for (const [key, block] of [["ArrowRight", "layer.23"], ["End", "layer.41"], ["Home", "text.0"], ["ArrowLeft", "text.0"], ["ArrowUp", "text.1"]]) {
          await page.page.keyboard.press(key)
          assert.ok((await tip.textContent()).startsWith(block), `${key}: ${await tip.textContent()}`)
        }
        const label = await page.page.evaluate(() => document.activeElement.getAttribute("aria-label"))
        assert.match(label, /^text\.1, peak \|x\| 112, 9\.2 bits of headroom$/)
        await page.page.keyboard.press("Escape")
        assert.equal(await tip.isVisible(), false)
        assert.equal(await position(), canvas, "the keys moved the canvas")
      })

      test("the table holds every number, and the chart comes back", async () => {
        const panel = page.panel(ids[2])
        const rows = await panel.rows()
        assert.equal(rows.length, 44)
        assert.deepEqual(rows[24], ["layer.22", "3904", "4.1", "0", "0", "0", "0"])
        await panel.click("table")
        await page.nodePicture(ids[2], name("table"))
        assert.equal(await panel.root.locator(".moss-chart").isVisible(), false)
        await panel.click("table")
        assert.equal(await panel.bars().count(), 44)
      })

      if (!vue) {
        test("the wheel over the panel still zooms the canvas", async () => {
          await page.show(ids[2])
          const before = await page.page.evaluate(() => window.app.canvas.ds.scale)
          await page.panel(ids[2]).root.locator(".moss-chart").hover()
          await page.page.mouse.wheel(0, -240)
          await sleep(200)
          assert.ok((await page.page.evaluate(() => window.app.canvas.ds.scale)) > before)
        })
      }

      test("nothing went wrong in our files", () => page.assertClean())
    })
  }
}

/** Nothing is cut off or spills over. At 220 px a long remark may scroll; nothing may ever spill sideways. */
async function fits(panel, width) {
  const { across, down } = await panel.root.evaluate((root) => ({
    across: root.scrollWidth - root.clientWidth,
    down: root.scrollHeight - root.clientHeight,
  }))
  assert.ok(across <= 0, `${across} px too wide at ${width}`)
  if (width > 300) assert.ok(down <= 1, `${down} px too high at ${width}`)
}
