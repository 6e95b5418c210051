"""Translate a recipe's generation settings into those of `transformers`."""

from __future__ import annotations

from typing import Any

from gptj_ft.config.options import Generation


def search_options(settings: Generation) -> dict[str, Any]:
    """Return the settings under the names of `transformers`."""
    options = settings.model_dump(exclude={"temperature", "top_p", "top_k", "min_p", "stop", "max_prompt_tokens"})
    if not settings.prompt_lookup_num_tokens:
        del options["prompt_lookup_num_tokens"]
    if settings.num_beams == 1:  # they would be warned of
        del options["length_penalty"], options["early_stopping"]
    options["do_sample"] = settings.temperature > 0
    if settings.temperature > 0:
        options |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        options |= {"min_p": settings.min_p} if settings.min_p else {}
    return options | ({"stop_strings": list(settings.stop)} if settings.stop else {})
