"""What mkdocs has to be told about this repository: README.md is a page, links out of docs/ become names of files, and
the site asks the network for nothing."""

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK_OR_IMAGE = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
LINK = re.compile(r"(?<!!)" + LINK_OR_IMAGE.pattern)
# What a browser fetches by itself; links that a reader follows are none of it.
FETCHED = re.compile(r"""<(?:(?:script|img|iframe|source)[^>]*\ssrc|link[^>]*\shref)=["']?(?:https?:)?//[^"'\s>]*""")


def on_files(files, config):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "readme.md", content=LINK_OR_IMAGE.sub(_from_docs, readme)))
    return files


def _from_docs(link: re.Match) -> str:
    """A link or image of README.md as docs/readme.md has it."""
    text, target = link.groups()
    return link[0] if target.startswith(("http", "#")) else f"[{text}]({posixpath.relpath(target, 'docs')})"


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewrite(link: re.Match) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if target.startswith(("http", "#")) or path.startswith("docs/"):
            return link[0]
        if path == "README.md":
            return f"[{text}]({posixpath.relpath('readme.md', posixpath.dirname(page.file.src_uri) or '.')})"
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {target} is not there")
        return f"`{path}`" if text.strip("`") in (path, posixpath.basename(path)) else f"{text} (`{path}`)"

    return LINK.sub(rewrite, markdown)


def on_post_page(output, page, config):
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: would ask the network for {found[0]}...")
    return output
