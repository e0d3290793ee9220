// How the site's search ranks what it finds. Sphinx gives a page its best word's score, so pages with one of the words
// in any heading come before the page that the question is about. Here counts how many of the question's words a title
// or a single heading has. Guides come before the reference of the package.
const stems = (text) => {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
  return words.map((word) => stemmer.stemWord(word));
};

// From 0, none of the words, to 1: the title has all of them, and no others.
const agreement = (words, title) => {
  const of_title = stems(title);
  const found = words.filter((word) => of_title.includes(word)).length;
  return words.length ? (0.8 * found) / words.length + (0.2 * found) / Math.max(of_title.length, words.length) : 0;
};

const headings = {}; // of each page, by its name

const headings_of = (docname) => {
  const { alltitles, docnames } = Search._index;
  if (!Object.keys(headings).length)
    for (const [title, places] of Object.entries(alltitles))
      for (const [file] of places) (headings[docnames[file]] ??= []).push(title);
  return headings[docname] ?? [];
};

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (kind === "object") return score - 30;
    const words = stems(new URLSearchParams(window.location.search).get("q") ?? "");
    const [page, heading] = title.split(" > ");
    const of_page = agreement(words, page);
    const best = heading ? agreement(words, heading) : Math.max(0, ...headings_of(docname).map((one) => agreement(words, one)));
    const reference = docname.startsWith("docs/api/") ? 5 : 0;
    return score + 20 * of_page + 15 * best - reference;
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
