// How the site's search ranks what it finds. Sphinx gives a page the score of its best word, so a page with one of the
// words in a heading comes before the page that the question is about. Here it counts how many of the words a title or
// a heading has. Guides come before the reference of the package, and its functions come last.
const stems = (text) => {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
  return words.map((word) => stemmer.stemWord(word));
};

// From 0, where the title has none of the words, to 2, where it is the question.
const agreement = (question, title) => {
  const [asked, told] = [stems(question), stems(title)];
  const found = asked.filter((word) => told.includes(word)).length;
  const phrase = question && title.toLowerCase().includes(question.toLowerCase());
  const share = found / (asked.length || 1);
  return share ** 2 + (0.5 * share * found) / (told.length || 1) + (phrase ? 0.5 : 0);
};

const headings = new Map(); // the headings of each page, by the page's name

const headingsOf = (page) => {
  const { alltitles, docnames } = Search._index;
  if (!headings.size)
    for (const [title, places] of Object.entries(alltitles))
      for (const [number] of places) headings.set(docnames[number], [...(headings.get(docnames[number]) ?? []), title]);
  return headings.get(page) ?? [];
};

var Scorer = {
  score: ([page, title, anchor, descr, score, filename, kind]) => {
    if (kind === "object") return score - 30;
    const question = new URLSearchParams(window.location.search).get("q") ?? "";
    const [name, heading] = title.split(" > ");
    const told = heading ? [heading] : headingsOf(page);
    const best = Math.max(0, ...told.map((one) => agreement(question, one)));
    return score + 10 * agreement(question, name) + 8 * best - (page.startsWith("docs/api/") ? 5 : 0);
  },
  // The rest is as Sphinx has it.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
