"""What MkDocs has to know about this repository (mkdocs.yml).

A file of the site has its path in the repository, so a link works on the host of the repository and on the site, and
MkDocs checks it. README, CONTRIBUTING, docs/ and the notebooks are pages. What they link to comes with them: a source
file as a page with its code, a folder as a list of its files. A notebook is shown with the outputs that it holds.
The site's home is the microscope, an HTML file that is a page by itself, too; README is beside it.
The pages of names (api.py) are no files: mkdocstrings makes them of the docstrings.
"""

import base64
import html
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import api  # beside this file, where MkDocs looks while it loads a hook
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "notebooks/*.ipynb")
HOME = "docs/site/microscope/index.html"
STATIC = (".png", ".svg", ".css", ".js", ".json", ".npz")
CODE = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}
BESIDE = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"  # of a page that the navigation does not have


class Page(File):
    """A page of any suffix, at its path and `.html`. A folder's index is its README or list, the site's is `HOME`."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def dest_uri(self) -> str:
        path = PurePosixPath(self.src_uri)
        if self.src_uri == HOME:
            return "index.html"
        if path.name == "README.md" and path.parent.name:
            return str(path.with_name("index.html"))
        if not path.suffix:
            return f"{path}/index.html"
        return f"{path.with_suffix('') if path.suffix in ('.md', '.ipynb') else path}.html"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, the pages, and everything that they link to."""
    root = Path(config.config_file_path).parent.resolve()
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    pages = [path for pattern in PAGES for path in sorted(root.glob(pattern))]
    waiting = [*pages, *(root / css for css in config.extra_css if (root / css).exists())]  # or a plugin writes it
    waiting += [path for path in sorted((root / HOME).parent.iterdir()) if path.suffix in STATIC]
    for path in waiting:  # which grows: what a page links to is put at its end
        uri = path.relative_to(root).as_posix()
        if path.suffix in STATIC:
            site.append(File(uri, str(root), config.site_dir, config.use_directory_urls))
            continue
        text, images = markdown(path, uri)
        listed = path in pages
        level = InclusionLevel.UNDEFINED if listed else InclusionLevel.NOT_IN_NAV
        site.append(Page.generated(config, uri, content=text if listed else BESIDE + text, inclusion=level))
        for name, png in images.items():
            site.append(File.generated(config, f"{uri.removesuffix(path.name)}{name}", content=png))
        if path.is_dir() or path.suffix in (".md", ".ipynb"):  # code may have what looks like a link
            linked = dict.fromkeys(target for target in links(text, path.parent) if root in target.parents)
            waiting += [target for target in linked if target not in waiting]
    for uri, text in api.pages():
        site.append(Page.generated(config, uri, content=text))
    site.append(Page.generated(config, HOME, content=home((root / HOME).read_text("utf-8"), site)))
    uris = [file.src_uri for file in site]
    config.nav = [entry for item in config.nav for entry in expanded(item, uris)]
    return site


def markdown(path: Path, uri: str) -> tuple[str, dict[str, bytes]]:
    """A file or a folder as a page, and the page's pictures by name."""
    if path.is_dir():
        inside = sorted(one.name for one in path.iterdir() if one.suffix in {*STATIC, *CODE, ".md"})
        return f"# {uri}\n\n" + "".join(f"- [{name}]({path.name}/{name})\n" for name in inside), {}
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        return notebook(json.loads(text), path.stem)
    if path.suffix == ".md":
        return blank_lines(text), {}
    return f"# {uri}\n\n````{CODE.get(path.suffix, 'text')}\n{text}````\n", {}


def home(text: str, site: Files) -> str:
    """The site's home: the styles and <main> of the microscope's file, whose addresses become those of the site."""

    def address(found: re.Match[str]) -> str:
        uri = posixpath.normpath(f"{PurePosixPath(HOME).parent}/{found[2]}")
        file = site.get_file_from_path(uri)
        if file is None:
            raise PluginError(f"{HOME} names {found[2]!r}, which the site does not have.")
        return f'{found[1]}="{file.url}"'

    styles = re.findall(r'<link rel="stylesheet"[^>]*>', text)
    main = text.partition("<main>")[2].partition("</main>")[0]
    inside = re.sub(r'\b(href|src)="(?!\w+:|#)([^"]+)"', address, "\n".join([*styles, main]))
    head = "title: The FP8 microscope\nhide: [navigation, toc]\n"
    return f"---\n{head}---\n<div>\n{inside}\n</div>\n"


def expanded(item: object, uris: Sequence[str]) -> Iterator[object]:
    """An entry of the navigation, with the pages that its patterns stand for."""
    if isinstance(item, dict):
        for title, inside in item.items():
            listed = isinstance(inside, list)
            yield {title: [entry for one in inside for entry in expanded(one, uris)] if listed else inside}
    elif "*" in str(item):
        pattern = PurePosixPath(str(item))
        yield from (
            uri
            for uri in uris
            if PurePosixPath(uri).parent == pattern.parent and PurePosixPath(uri).match(str(pattern))
        )
    else:
        yield item


def links(text: str, folder: Path) -> Iterator[Path]:
    """The files and folders that a page links to and that exist; MkDocs reports the others."""
    for link in re.findall(r"\]\((?!\w+:|/|#)([^)#\s]+)", text):
        if (target := (folder / link).resolve()).exists():
            yield target


def notebook(content: dict, stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in content["cells"]:
        source = "".join(cell["source"])
        parts.append(blank_lines(source) if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(images) + 1}.png"
                images[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", ())))
                parts.append(f"```{{ .text .output .no-copy }}\n{text.rstrip()}\n```")
    about = f"*A notebook, with the outputs of one run. `jupyter lab notebooks/{stem}.ipynb` runs it again"
    sliders = any("play(" in "".join(cell["source"]) for cell in content["cells"])
    parts.insert(1, f"{about}, and has its sliders.*" if sliders else f"{about}.*")
    return "\n\n".join(parts), images


def blank_lines(text: str) -> str:
    """The blank lines that Python-Markdown, unlike CommonMark, needs around code and before a paragraph's list."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    before_a_list = re.compile(r"^(?![-*+] |\d+\. |\s|$)(.+)\n(?=[-*+] |1\. )", re.MULTILINE)
    return "\n".join(part if i % 2 else before_a_list.sub(r"\1\n\n", part) for i, part in enumerate(parts))


def on_page_content(content: str, **_: object) -> str:
    """Formulas as MathML, which browsers lay out without a script."""
    formula = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[])]</\1>', re.DOTALL)
    display = {"span": "inline", "div": "block"}
    return formula.sub(lambda found: convert(html.unescape(found[2]), display=display[found[1]]), content)
