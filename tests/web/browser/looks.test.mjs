// How the panel reads: both canvases, both themes, 220 and 600 px, zoomed out; by pointer and by keyboard; contrast.

import assert from "node:assert/strict"
import { after, before, describe, test } from "node:test"
import { CASES } from "../unit/reports.mjs"
import { Page } from "./comfy.mjs"

const FIRST_LINES = {
  fine: "Image not affected by fp16",
  tight: "Image not affected by fp16",
  rescued: "Image is fine: step 4 was computed again with online c=1/2",
  saturated: "Image may be wrong: values hit fp16's limit",
  broken: "Image is black or broken: the model left fp16's range",
}
const FACTS = {
  fine: "largest value 3904 in layer.22 · margin 4.1 bits",
  tight: "largest value 52\u202f000 in layer.22 · margin 0.33 bits (small)",
  rescued: "largest value 31\u202f000 in layer.22 · margin 1.1 bits (small)",
  saturated: "layer.18, layer.19, layer.20 and 6 more reached fp16's limit of 65504",
  broken: "NaN or infinity in layer.16, layer.17, layer.18 and 10 more",
}
const AA = 4.5 // WCAG 2: text
const MARKS = 3 // WCAG 2: what is not text

/** The WCAG contrast of what an element is drawn in against what is behind it: {text: [[name, ratio]], marks: [...]}. */
const contrasts = (panel) =>
  panel.root.evaluate((root) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true })
    const over = (colour, ground) => {
      canvas.clearRect(0, 0, 1, 1)
      for (const layer of [ground, colour]) {
        canvas.fillStyle = layer
        canvas.fillRect(0, 0, 1, 1)
      }
      const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => {
        const s = v / 255
        return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4
      })
      return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const base = getComputedStyle(root).backgroundColor
    const behind = (element) => {
      for (let at = element; at && at !== root; at = at.parentElement) {
        const colour = getComputedStyle(at).backgroundColor
        if (colour && !/rgba\(.*, 0\)|transparent/.test(colour)) return colour
      }
      return base
    }
    const ratio = (ink, ground) => {
      const pair = [over(ink, ground), over(ground, base)]
      return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)
    }
    const seen = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0
    const text = []
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement
      if (!walker.currentNode.textContent.trim() || !seen(element) || element.closest(".moss-live, caption, :disabled")) continue
      const style = getComputedStyle(element)
      const svg = element instanceof SVGElement
      text.push([element.getAttribute("class") ?? element.tagName, ratio(svg ? style.fill : style.color, behind(svg ? element.closest("svg") : element))])
    }
    const marks = []
    for (const element of root.querySelectorAll(".moss-mark[d]:not([d='']), .moss-bar rect, .moss-limit")) {
      const style = getComputedStyle(element)
      const ink = element.matches(".moss-mark:not(.moss-level-not_finite)") ? style.fill : style.stroke
      marks.push([`${element.tagName} ${element.getAttribute("class") ?? element.parentElement.getAttribute("class")}`, ratio(ink, base)])
    }
    for (const element of root.querySelectorAll(".moss-actions button:not(:disabled)")) marks.push(["button", ratio(getComputedStyle(element).color, base)])
    return { text, marks }
  })

for (const vue of [false, true]) {
  describe(vue ? "Nodes 2.0" : "classic canvas", () => {
    let page, workflow, ids, theme
    const name = (rest) => `${vue ? "nodes2" : "classic"}-${theme}-${rest}`
    before(async () => {
      page = await Page.open({ vue })
      ;({ workflow, ids } = await page.place([["MossFP16Fix", 220], ["MossFP16Loader", 300], ["MossFP16Report", 600]]))
    })
    after(() => page?.close())
    const send = (id, given) =>
      page.message("moss_fp16.report", {
        node_id: id, prompt_id: `run-${Math.random()}`, workflow_id: workflow, state: "done", report: { ...given, node_id: ids[1] },
      })

    for (const dark of [true, false]) {
      test(`${dark ? "dark" : "light"} theme`, async (t) => {
        theme = dark ? "dark" : "light"
        await page.theme(dark)
        await page.set(ids[1], { fix: "none" })
        for (const [which, given] of Object.entries(CASES)) {
          await t.test(`${which}: what it means, the number behind it and what to do, at every width`, async () => {
            for (const id of [ids[0], ids[2]]) await send(id, given)
            for (const [id, width] of [[ids[0], 220], [ids[2], 600]]) {
              await page.show(id)
              const panel = page.panel(id)
              assert.equal(await panel.text("headline"), FIRST_LINES[which])
              assert.equal(await panel.text("fact"), FACTS[which])
              assert.equal(await panel.bars().count(), 44)
              const remedied = Boolean(given.remedy)
              assert.equal(await panel.shows("remedy"), remedied)
              if (remedied) assert.equal(await panel.text("remedy-button"), "Set fix = auto")
              const box = await panel.root.boundingBox()
              assert.ok(Math.abs(box.width - width) < 50, `${box.width} for a node of ${width}`)
              const chart = await panel.root.locator(".moss-chart").boundingBox()
              assert.ok(chart.height >= 80 && chart.width > box.width - 30, JSON.stringify(chart))
              await fits(panel, width)
              const { text, marks } = await contrasts(panel)
              assert.ok(text.length > 8 && marks.length > 44)
              for (const [what, ratio] of text) assert.ok(ratio >= AA, `${what}: contrast ${ratio.toFixed(2)}`)
              for (const [what, ratio] of marks) assert.ok(ratio >= MARKS, `${what}: contrast ${ratio.toFixed(2)}`)
              await page.nodePicture(id, name(`${which}-${width}`))
            }
          })
        }

        await t.test("zoomed out, what it means and what to do stay, larger", async () => {
          await page.show(ids[1], { zoom: 0.4 })
          const panel = page.panel(ids[2])
          await page.page.waitForFunction((id) => document.querySelector(`.moss-panel[data-node-id="${id}"]`).matches(".moss-far"), ids[2])
          for (const part of ["badge", "headline", "remedy-text", "remedy-button", "chart"]) assert.ok(await panel.shows(part), part)
          for (const part of ["status", "remarks", "fact"]) assert.equal(await panel.shows(part), false, part)
          for (const part of ["headline", "remedy-text"]) {
            const size = await panel.root.locator(`.moss-${part}`).evaluate((e) => parseFloat(getComputedStyle(e).fontSize))
            assert.ok(size * 0.4 >= 6.5, `${part}: ${size * 0.4} px on screen`)
          }
          await page.picture(name("zoomed-out"))
          await page.show(ids[2])
          assert.ok(await panel.shows("status"))
        })

        await t.test("buttons are large enough to hit", async () => {
          for (const button of await page.panel(ids[2]).root.locator("button:visible").all()) {
            const { width, height } = await button.boundingBox()
            assert.ok(width >= 24 && height >= 24, `${await button.getAttribute("class")}: ${width} x ${height}`)
          }
        })
      })
    }

    test("numbers by pointer and by keyboard", async () => {
      await send(ids[2], CASES.fine)
      await page.show(ids[2])
      const panel = page.panel(ids[2])
      const tip = panel.root.locator(".moss-tip")
      await panel.bars().nth(24).hover({ force: true })
      assert.match(await tip.textContent(), /^layer\.22largest \|x\| 3904margin 4\.1 bits$/)
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
      assert.equal(label, "text.1, largest |x| 112, margin 9.2 bits")
      await page.page.keyboard.press("Escape")
      assert.equal(await tip.isVisible(), false)
      assert.equal(await position(), canvas, "the keys moved the canvas")
    })

    test("the table holds every number that is not 0 throughout, fits, and the chart comes back", async () => {
      const panel = page.panel(ids[2])
      let rows = await panel.rows()
      assert.equal(rows.length, 45)
      assert.deepEqual(rows[0], ["Block", "Peak |x|", "Margin, bits"])
      assert.deepEqual(rows[25], ["layer.22", "3904", "4.1"])
      await send(ids[2], CASES.broken)
      rows = await panel.rows()
      assert.deepEqual(rows[0], ["Block", "Peak |x|", "Margin, bits", "NaN/inf", "Saturated", "> 4096"])
      assert.deepEqual(rows[25], ["layer.22", "∞", "−∞", "98\u202f304", "6", "9"])
      await page.show(ids[2], { width: 460 })
      await panel.click("table")
      const table = await panel.root.locator(".moss-table").evaluate((e) => e.scrollWidth - e.clientWidth)
      assert.ok(table <= 0, `${table} px too wide`)
      await page.nodePicture(ids[2], name("table"))
      assert.equal(await panel.root.locator(".moss-chart").isVisible(), false)
      await panel.click("table")
      assert.equal(await panel.bars().count(), 44)
    })

    test("without red and green the levels are still told apart, by mark and hatch", async () => {
      const devtools = await page.context.newCDPSession(page.page)
      await devtools.send("Emulation.setEmulatedVisionDeficiency", { type: "deuteranopia" })
      for (const dark of [true, false]) {
        await page.theme(dark)
        theme = dark ? "dark" : "light"
        await send(ids[2], CASES.broken)
        await page.show(ids[2])
        const looks = await page.panel(ids[2]).root.evaluate((root) =>
          [...root.querySelectorAll(".moss-bar")].map((bar, i) => [
            /moss-level-(\w+)/.exec(bar.getAttribute("class"))[1],
            `${root.querySelectorAll(".moss-mark")[i].getAttribute("d")} ${bar.querySelector("rect").style.fill.replace(/moss-\d+/, "")}`,
          ]),
        )
        const byLevel = new Map(looks)
        assert.equal(byLevel.size, 4)
        assert.equal(new Set(byLevel.values()).size, 4, "two levels look alike without colour")
        await page.nodePicture(ids[2], name("deuteranopia"))
      }
      await devtools.send("Emulation.setEmulatedVisionDeficiency", { type: "none" })
      await page.theme(true)
    })

    test("small bars keep their hatch, and every level its mark, over the bar", async () => {
      await send(ids[0], CASES.broken)
      await page.show(ids[0])
      const bars = await page.panel(ids[0]).root.evaluate((root) => {
        const marks = [...root.querySelectorAll(".moss-mark")]
        return [...root.querySelectorAll(".moss-bar")].map((bar, i) => {
          const rect = bar.querySelector("rect")
          const top = rect.getBoundingClientRect().top
          return {
            level: /moss-level-(\w+)/.exec(bar.getAttribute("class"))[1], width: rect.getBoundingClientRect().width,
            hatched: rect.style.fill.includes("url"), over: (marks[i].getAttribute("d") ? marks[i].getBoundingClientRect().bottom : -1) - top,
          }
        })
      })
      assert.deepEqual([...new Set(bars.map((bar) => bar.level))].sort(), ["low", "not_finite", "ok", "saturated"])
      for (const bar of bars) {
        assert.ok(bar.width < 5, `${bar.width} px`)
        assert.equal(bar.hatched, ["saturated", "not_finite"].includes(bar.level), bar.level)
        assert.ok(bar.over < 2, `${bar.level}: its mark is ${bar.over} px into the bar`)
      }
    })

    if (!vue) {
      test("the wheel over the panel still zooms the canvas", async () => {
        await page.show(ids[2])
        const scale = () => page.page.evaluate(() => window.app.canvas.ds.scale)
        const before = await scale()
        await page.panel(ids[2]).root.locator(".moss-chart").hover()
        await page.page.mouse.wheel(0, -240)
        await page.page.waitForFunction((before) => window.app.canvas.ds.scale > before, before)
      })
    }

    test("nothing went wrong in our files", () => page.assertClean())
  })
}

/** Nothing is cut off or spills over. At 220 px a long text may scroll; nothing may ever spill sideways. */
async function fits(panel, width) {
  const { across, down } = await panel.root.evaluate((root) => ({
    across: root.scrollWidth - root.clientWidth,
    down: root.scrollHeight - root.clientHeight,
  }))
  assert.ok(across <= 0, `${across} px too wide at ${width}`)
  if (width > 300) assert.ok(down <= 1, `${down} px too high at ${width}`)
}
