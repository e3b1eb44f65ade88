"""What axe-core finds wrong with a page that a browser shows."""

import pytest


def violations(page) -> list[str]:
    """Each rule that the page breaks, with the first element that breaks it; open the page with ``bypass_csp``."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-core checks the page: pip install axe-playwright-python"
    )
    found = axe.Axe().run(page).response["violations"]
    return [f"{rule['id']} ({len(rule['nodes'])}): {rule['nodes'][0]['html'][:200]}" for rule in found]
