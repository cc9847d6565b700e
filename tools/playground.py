"""Write docs/playground.html anew: python tools/playground.py"""

from pathlib import Path

from draftsmith.models.storage.files import write_whole
from draftsmith.recipes.pages.rendering import playground_page

PAGE = Path(__file__).parents[1] / "docs/playground.html"

if __name__ == "__main__":
    write_whole(PAGE, playground_page())
