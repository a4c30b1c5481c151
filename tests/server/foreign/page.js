// Opens the server's page in a browser, generates, and prints what is to be seen as one JSON object.
// Usage: node page.js URL CHROMIUM SCREENSHOT
const puppeteer = require("puppeteer-core");

const [url, browserPath, screenshot] = process.argv.slice(2);

async function main() {
  const browser = await puppeteer.launch({
    executablePath: browserPath,
    args: ["--no-sandbox", "--disable-gpu"],
    defaultViewport: { width: 1440, height: 960 },
  });
  try {
    const page = await browser.newPage();
    const complaints = [];
    page.on("pageerror", (error) => complaints.push(error.message));
    page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
    await page.goto(url);
    const outcome = async () => {
      await page.click("#go");
      await page.waitForFunction(() => !document.querySelector("#go").disabled);
      return page.$eval("#outcome", (element) => element.textContent);
    };
    await page.$eval("#max_tokens", (element) => (element.value = "20"));
    const done = await outcome();
    const answer = await page.$eval("#answer", (element) => element.textContent);
    // Prompt chunks are blue, decodes green: both are to be seen before long.
    const shows = (red, green, blue) =>
      page.waitForFunction(
        (wanted) => {
          const board = document.querySelector("#board");
          if (!board.width || !board.height) return false;
          const { data } = board.getContext("2d").getImageData(0, 0, board.width, board.height);
          for (let i = 0; i < data.length; i += 4) if (wanted.every((value, at) => data[i + at] === value)) return true;
          return false;
        },
        {},
        [red, green, blue],
      );
    await shows(0x4f, 0xa3, 0x7c);
    await shows(0x3b, 0x6f, 0xb6);
    const numbers = await page.$eval("#numbers", (element) => element.innerText);
    const health = await page.$eval("#health", (element) => element.textContent);
    await page.screenshot({ path: screenshot });
    await page.$eval("#temperature", (element) => (element.value = "-3"));
    const refused = await outcome();
    console.log(JSON.stringify({ done, answer, numbers, health, refused, complaints }));
  } finally {
    await browser.close();
  }
}

main();
