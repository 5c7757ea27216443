// Answers queries with the search engine and the index of a built site: node search.js SITE QUERY…
// Prints, as JSON, the locations that each query finds, best first.
const { readFileSync, readdirSync } = require("fs");
const { runInThisContext } = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers/`;
const engine = readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
let answer, result;
Object.assign(globalThis, {
  self: globalThis,
  location: { href: "http://localhost/" },
  importScripts() {},
  addEventListener: (_, listener) => (answer = listener),
  postMessage: (message) => (result = message),
});
runInThisContext(readFileSync(workers + engine, "utf8"));

(async () => {
  const { config, docs } = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
  await answer({ data: { type: 0, data: { config, docs, options: {} } } }); // 0: set up, 2: a query
  const found = {};
  for (const query of queries) {
    await answer({ data: { type: 2, data: query } });
    found[query] = result.data.items.map((page) => page[0].location);
  }
  console.log(JSON.stringify(found));
})();
