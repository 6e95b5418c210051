"""Fine-tune GPT-J 6B on one machine by weight streaming.

Public functions and classes are imported on first use, so importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptj_ft.api import (
        Model,
        doctor,
        evaluate,
        evaluate_predictions,
        evaluate_tasks,
        finetune,
        generate_file,
        leaks,
        load,
        plan,
        plan_evaluation,
        predict,
        predict_file,
        prepare,
        prepare_run,
        prepare_search,
        prove,
        search,
    )
    from gptj_ft.cli.html.live_page import LivePage
    from gptj_ft.config.options import Recipe
    from gptj_ft.diagnostics.checkup import Diagnosis
    from gptj_ft.diagnostics.proof import Proof, ProofRequest
    from gptj_ft.errors import GptjFtError
    from gptj_ft.evaluation.comparison import ModelComparison
    from gptj_ft.evaluation.evaluate import EvaluateRequest
    from gptj_ft.evaluation.generate import BatchResult
    from gptj_ft.evaluation.leak_report import LeakReport
    from gptj_ft.evaluation.predict import LabelResult
    from gptj_ft.generation.generator import Answer
    from gptj_ft.training.finetune import PreparedRun
    from gptj_ft.training.forecast import Forecast
    from gptj_ft.training.loop import TrainResult
    from gptj_ft.training.prepare_command import Preparation
    from gptj_ft.training.reporter import Progress, Reporter, Reporters, StepReport
    from gptj_ft.training.search import PreparedSearch, SearchResult

__version__ = "0.1.0"
_HOMES = {  # modules of the names outside `api`
    "LivePage": "cli.html.live_page",
    "Recipe": "config.options",
    "GptjFtError": "errors",
    "LabelResult": "evaluation.predict",
    "ModelComparison": "evaluation.comparison",
    "EvaluateRequest": "evaluation.evaluate",
    "BatchResult": "evaluation.generate",
    "LeakReport": "evaluation.leak_report",
    "Answer": "generation.generator",
    "Diagnosis": "diagnostics.checkup",
    "Forecast": "training.forecast",
    "PreparedRun": "training.finetune",
    "TrainResult": "training.loop",
    "Preparation": "training.prepare_command",
    "Proof": "diagnostics.proof",
    "ProofRequest": "diagnostics.proof",
    "Progress": "training.reporter",
    "Reporter": "training.reporter",
    "Reporters": "training.reporter",
    "StepReport": "training.reporter",
    "PreparedSearch": "training.search",
    "SearchResult": "training.search",
}
__all__ = [
    "Answer",
    "BatchResult",
    "Diagnosis",
    "EvaluateRequest",
    "Forecast",
    "GptjFtError",
    "LabelResult",
    "LeakReport",
    "LivePage",
    "Model",
    "ModelComparison",
    "Preparation",
    "PreparedRun",
    "PreparedSearch",
    "Progress",
    "Proof",
    "ProofRequest",
    "Recipe",
    "Reporter",
    "Reporters",
    "SearchResult",
    "StepReport",
    "TrainResult",
    "doctor",
    "evaluate",
    "evaluate_predictions",
    "evaluate_tasks",
    "finetune",
    "generate_file",
    "leaks",
    "load",
    "plan",
    "plan_evaluation",
    "predict",
    "predict_file",
    "prepare",
    "prepare_run",
    "prepare_search",
    "prove",
    "search",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'gptj_ft' has no attribute '{name}'")
    return getattr(import_module(f"gptj_ft.{_HOMES.get(name, 'api')}"), name)
