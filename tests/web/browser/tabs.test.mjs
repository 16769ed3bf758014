// More than one page on a server, and a server that goes away: what each panel shows.

import assert from "node:assert/strict"
import { after, before, test } from "node:test"
import { EXAMPLES, Page, example, sleep, until } from "./comfy.mjs"

const values = (steps, seed, loader = {}) => ({
  MossFP16Loader: { model_name: "hot.safetensors", compute_dtype: "fp16", self_check: false, ...loader },
  EmptyFlux2LatentImage: { width: 64, height: 64 },
  KSampler: { steps, seed },
})
/** What a page tries in vain while the server is away. */
const AWAY = /ERR_CONNECTION_REFUSED|Failed to fetch|NetworkError|WebSocket|could not be read/
const step = (state) => Number(/^step (\d+) of/.exec(state)?.[1] ?? 0)

let page, other, ids, panel, loader
before(async () => {
  page = await Page.open()
  ids = await page.workflow(example(EXAMPLES.headless), values(300, 900))
  panel = page.panel(ids.MossFP16Report[0])
  loader = page.panel(ids.MossFP16Loader[0])
  await page.show(ids.MossFP16Report[0])
  other = await page.tab()
})
after(() => page?.close())

/** The same workflow, by its id, in the other tab. */
async function sameThere() {
  const json = await page.page.evaluate(() => window.app.rootGraph.serialize())
  await other.page.evaluate((json) => window.app.loadGraphData(json, true, true, null), json)
  await other.show(ids.MossFP16Report[0])
  return other.panel(ids.MossFP16Report[0])
}

test("a workflow opened while it runs picks the run up; both tabs see it end", async () => {
  const prompt = await page.queue()
  const first = step(await panel.until((state) => step(state) > 0, "the first tab"))
  const there = await sameThere()
  const joined = step(await there.until((state) => step(state) > 0, "the second tab"))
  assert.ok(joined >= first)
  await there.until((state) => step(state) > joined, "live in the second tab")
  await other.page.evaluate(() => window.app.api.interrupt())
  await page.history(prompt)
  for (const seen of [panel, there]) assert.match(await seen.until((s) => s.startsWith("interrupted at"), "interrupted"), /of 300/)
  assert.equal(await there.bars().count(), 6)
})

test("what another tab queues is shown here, and says so in its queue", async () => {
  const there = await sameThere()
  for (const [seed, steps] of [[901, 12], [902, 8]]) {
    await other.set(ids.KSampler[0], { seed, steps })
    await other.queue()
  }
  await panel.until((state) => step(state) > 0 && /of (12|8)/.test(state), "the other tab's run")
  for (const seen of [panel, there]) await seen.until((state) => state === "done, 8 steps", "the second run")
})

test("two tabs with different workflows do not mix", async () => {
  const mine = await other.workflow(example(EXAMPLES.headless), values(5, 903))
  await other.show(mine.MossFP16Report[0])
  const said = await panel.state()
  const prompt = await other.queue()
  await other.history(prompt)
  await other.panel(mine.MossFP16Report[0]).until((state) => state === "done, 5 steps", "the other workflow")
  assert.equal(await panel.state(), said)
})

test("queued behind another run, the panel says so", async () => {
  await page.set(ids.KSampler[0], { seed: 904, steps: 2000 })
  await page.queue()
  await loader.until((state) => step(state) > 0, "the long run")
  const mine = await other.workflow(example(EXAMPLES.headless), values(4, 905))
  await other.show(mine.MossFP16Report[0])
  await other.queue()
  const waiting = other.panel(mine.MossFP16Report[0])
  await waiting.until((state) => state === "queued", "queued")
  assert.match(await waiting.text("message"), /starts when the runs before it are over/)
  await page.page.evaluate(() => window.app.api.interrupt())
  await waiting.until((state) => state === "done, 4 steps", "its turn")
})

test("a server that was restarted: the run is over, the panel says so, and the next run works", { skip: !process.env.MOSS_CONTROL && "no MOSS_CONTROL: this ComfyUI cannot be restarted from here" }, async () => {
  await page.set(ids.KSampler[0], { seed: 906, steps: 2000 })
  await page.queue()
  await panel.until((state) => step(state) > 0, "a first step")
  const response = await fetch(process.env.MOSS_CONTROL, { method: "POST" })
  assert.equal(response.status, 204)
  await until(async () => /^interrupted/.test(await panel.state()), "interrupted, once the page is back")
  assert.equal(await panel.bars().count(), 6)
  await page.set(ids.KSampler[0], { seed: 907, steps: 4 })
  await sleep(500)
  await page.queue()
  await panel.until((state) => state === "done, 4 steps", "the run after")
  page.messages = page.messages.filter((line) => !AWAY.test(line))
})

test("nothing went wrong in our files", () => {
  page.assertClean()
  other.messages = other.messages.filter((line) => !AWAY.test(line))
  other.assertClean()
})
