"""Train the embedded default target: a small Llama that writes Python, and answers in dialogues about it.

    python tools/tiny_target_text.py --out TEXT.jsonl
    python tools/train_tiny_target.py --text TEXT.jsonl --out DIR [--steps 4000] [--decay-share 0.2] [--start MODEL]

DIR/model is what the package ships in recipes/tiny_python/; its README.md, written by this command, is the model card.
The same command goes on where it was stopped. The learning rate is constant before it falls in the last steps, which
read more of the standard library. A finished run goes on with more --steps, too: from DIR/stable.pt, the state before
the fall. --start MODEL begins with the weights and the tokenizer of a model in place of new ones; of several models,
with the mean of their weights. The mean can be better than each of them, where they began alike and read their text in
different orders (Wortsman et al., "Model soups", arXiv 2203.05482).
"""

import argparse
import hashlib
import io
import math
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import torch
from tiny_target_quality import NEW_TOKENS, function_loss
from tiny_target_text import STANDARD_LIBRARY, Document, read_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.prompts.code_dialogues import code_dialogues
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions, stdlib_groups
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.devices import training_precision
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Precision
from draftsmith.models.storage.files import write_whole
from draftsmith.train.config import OptimizerConfig
from draftsmith.train.optimizer import Muon, MuonAndAdamW, learning_rate, set_learning_rate

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
FUNCTION_SHOWN, DIALOGUE_SHOWN = 231, 58  # of the held-out ones, on the card
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Shape:
    """The model. Not wider, because a step of decoding shall cost many times what a drafter's layer does."""

    vocab_size: int = 2048  # without the marks of dialogues
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 12
    num_heads: int = 4
    num_key_value_heads: int = 2
    context: int = 512  # tokens, in training and at use


@dataclass
class Training:
    """The run. Its rate is constant until the last `decay_share` of the steps, in which it falls to zero.

    These last steps read more of the standard library, which the model is measured on.
    """

    steps: int = 4000
    tokens_per_step: int = 8192
    tokens_per_pass: int = 2048  # of a step, forward and backward at once: few enough to stay in a CPU's caches
    whole_rows_every: int = 4  # steps; rows of the others are half as long as the context, which is faster
    stdlib_copies: int = 2  # how often an epoch holds the standard library's documents; of 16 many are learnt by heart
    last_stdlib_copies: int = 16  # the same of the last steps, a third of whose text this is
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=4e-3,
            weight_decay=0.5,  # of matrices; more than usual, since the last steps read the same text several times
            matrices="muon",
            decay="late",
            warmup_share=0.01,
            final_share=0.0,
            max_gradient_norm=1.0,
        )
    )
    minutes_between_saves: float = 5.0
    compiled: bool = True  # layers are compiled, which takes a minute and is faster afterwards
    precision: Precision | None = None  # of matrix products; None: bf16 on a GPU, fp32 on a CPU
    start: list[str] = field(default_factory=list)  # models whose mean it begins with; none: new weights
    seed: int = 0  # of new weights, and of the order of documents


# --- text


@dataclass
class Text:
    """What a model learns from and is measured on, and its tokenizer."""

    documents: list[Document]  # of a file of tools/tiny_target_text.py
    held_out: list[str]  # functions
    tokenizer: PreTrainedTokenizerFast


def train_tokenizer(functions: list[str], shape: Shape) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE. `<|endoftext|>` begins and ends every text and pads batches; dialogues have marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(functions, trainer)
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", END_OF_TURN])
    mark = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, mark)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=shape.context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def tokenize(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    """Return the ids of each document, which `<|endoftext|>` begins; that of the next document ends it."""
    texts = [
        document.text if document.messages is None else tokenizer.apply_chat_template(document.messages, tokenize=False)
        for document in documents
    ]
    mark = tokenizer.bos_token_id
    ids = []
    for start in range(0, len(texts), 4096):  # lists of all ids at once would take gigabytes
        batch = [str(text).removeprefix(END_OF_TEXT) for text in texts[start : start + 4096]]
        found = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        ids += [torch.tensor([mark, *document], dtype=torch.int16) for document in found]
    return ids


class StepRows:
    """Documents laid end to end in random order, anew each epoch, and cut into rows.

    The rows of a step depend on its number alone, so that a run goes on where it was stopped.
    """

    def __init__(self, documents: list[torch.Tensor], shape: Shape, training: Training) -> None:
        self.documents, self.context, self.training = documents, shape.context, training
        self.num_tokens = sum(map(len, documents))  # of an epoch
        self.steps_per_epoch = (self.num_tokens - 1) // training.tokens_per_step
        self._epoch = -1

    def of_step(self, step: int) -> torch.Tensor:
        """Return the token ids of a step, [rows, length + 1]; each row's last token is the next row's first."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.training.seed + epoch)
            order = torch.randperm(len(self.documents), generator=generator).tolist()
            self._stream, self._epoch = torch.cat([self.documents[index] for index in order]), epoch
        start = place * self.training.tokens_per_step
        ids = self._stream[start : start + self.training.tokens_per_step + 1].long()
        length = self.context if step % self.training.whole_rows_every == 0 else self.context // 2
        return ids.unfold(0, length + 1, length)


# --- model


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_key_value_heads,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)]
    return model


@torch.no_grad()
def mean_model(paths: list[str]) -> LlamaForCausalLM:
    """Return a model in fp32 whose weights are the mean of those that earlier runs wrote."""
    model, *others = (LlamaForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths)
    assert isinstance(model, LlamaForCausalLM)
    for number, other in enumerate(others, 2):
        for weight, added in zip(model.parameters(), other.parameters(), strict=True):
            weight.lerp_(added, 1 / number)
    return model


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor, precision: Precision | None) -> torch.Tensor:
    """Return the mean cross-entropy of rows, [rows, length + 1]."""
    with training_precision(rows.device, precision):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def build_optimizer(model: LlamaForCausalLM, config: OptimizerConfig) -> MuonAndAdamW:
    """Return Muon for the layers' matrices beside AdamW for embeddings, whose rows are tokens, and norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(rest, betas=(config.beta1, config.beta2), weight_decay=0.0, fused=True)
    return MuonAndAdamW(Muon({matrix: [len(matrix)] for matrix in matrices}, config.weight_decay), adamw)


# --- training


class TargetRun:
    """A training and its folder, which holds two states: `stable.pt` of the constant rate, `decay.pt` of the end."""

    def __init__(self, text: Text, out: Path, shape: Shape, training: Training, device: str = "cpu") -> None:
        torch.manual_seed(training.seed)
        self.text, self.out, self.shape, self.training = text, out, shape, training
        self.model = mean_model(training.start) if training.start else build_model(shape, text.tokenizer)
        torch.nn.Module.to(self.model, device)
        if device == "cpu":  # where the gradient of the fused attention takes twice as long
            self.model.set_attn_implementation("eager")
        self.optimizer = build_optimizer(self.model, training.optimizer)
        self.step, self.seconds = 0, 0.0  # so far, in all calls together
        self.resume()
        ids = tokenize(text.documents, text.tokenizer)
        library = [
            own for own, document in zip(ids, text.documents, strict=True) if document.source == STANDARD_LIBRARY
        ]
        self.rows = StepRows(ids + (training.stdlib_copies - 1) * library, shape, training)
        self.last_rows = StepRows(ids + (training.last_stdlib_copies - 1) * library, shape, training)
        if training.compiled:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens trained on so far."""
        return self.step * self.training.tokens_per_step

    @property
    def decay_start(self) -> int:
        """Number of steps before the rate falls."""
        return self.training.optimizer.decay_start(self.training.steps)

    def train(self) -> None:
        """Take the steps that are left. Save and measure every few minutes, where the rate falls, and at the end."""
        saved = time.monotonic()
        while self.step < self.training.steps:
            started = time.monotonic()
            loss = self.take_step()
            self.seconds += time.monotonic() - started
            late = time.monotonic() - saved > 60 * self.training.minutes_between_saves
            if late or self.step in (self.decay_start, self.training.steps):
                self.save()
                self.report(loss)
                saved = time.monotonic()

    def take_step(self) -> float:
        """Take one step and return its loss."""
        config = self.training.optimizer
        rows = (self.rows if self.step < self.decay_start else self.last_rows).of_step(self.step)
        rows = rows.to(self.model.device)
        loss = 0.0
        for part in rows.split(max(1, self.training.tokens_per_pass // (rows.shape[1] - 1))):
            share = loss_of(self.model, part, self.training.precision) * (len(part) / len(rows))
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_gradient_norm)
        set_learning_rate(self.optimizer, learning_rate(self.step, self.training.steps, config))
        with training_precision(self.model.device, self.training.precision):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss

    def report(self, loss: float) -> None:
        """Print how far the run is, with the loss of the last step and on held-out files."""
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled for
            held_out = function_loss(self.model, self.text.tokenizer, self.text.held_out)
        print(
            f"step {self.step}, {self.num_tokens / 1e6:.2f} M tokens, {self.num_tokens / self.seconds:.0f} a second: "
            f"loss {loss:.3f}, held-out loss {held_out.per_token:.3f}",
            flush=True,
        )

    def save(self) -> None:
        """Write the state, whole or not at all, and the model."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content = io.BytesIO()
        schedule = {"steps": self.training.steps, "decay_start": self.decay_start}
        torch.save({**state, **schedule, "step": self.step, "seconds": self.seconds}, content)
        write_whole(self.out / ("stable.pt" if self.step <= self.decay_start else "decay.pt"), content.getvalue())
        self.save_model()

    def save_model(self) -> None:
        """Write the model, whose weights go to disk in bf16, at half the size, and its tokenizer."""
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        self.model.save_pretrained(self.out / "model", state_dict=weights)
        self.text.tokenizer.save_pretrained(self.out / "model")

    def resume(self) -> None:
        """Go on from the decay of a run with the same schedule, or else from before the decay of another one."""
        for name in ("decay.pt", "stable.pt"):
            if not (self.out / name).is_file():
                continue
            state = torch.load(self.out / name, weights_only=True, map_location=self.model.device)
            schedule = (self.training.steps, self.decay_start)
            if name == "decay.pt" and (state["steps"], state["decay_start"]) != schedule:
                continue
            if name == "stable.pt" and state["step"] > self.decay_start:
                least = math.ceil(state["step"] / (1 - self.training.optimizer.decay_share))
                raise UserError(f"{self.out} holds {state['step']} steps: give --steps {least} or more")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
            return


# --- card


def completion(run: TargetRun, prompt: Prompt) -> str:
    """Return the greedy answer of the model on disk to a prompt, with the prompt."""
    target = Target.from_pretrained(run.out / "model", "cpu", torch.float32)
    [ids] = encode_prompts([prompt], target)
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    return str(
        run.text.tokenizer.decode(ids + decoder.generate([ids], NEW_TOKENS).token_ids[0], skip_special_tokens=False)
    )


def machine(device: torch.device) -> str:
    """Return the name of what a model was trained on."""
    if device.type == "cuda":
        return f"an {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} threads of a {platform.machine()} CPU"


def write_card(run: TargetRun, path: Path) -> None:
    """Write README.md beside the model: what it is made of, and how good it is."""
    held_out = function_loss(run.model, run.text.tokenizer, run.text.held_out)
    function = run.text.held_out[FUNCTION_SHOWN]
    question = code_dialogues(stdlib_groups(held_out=True))[DIALOGUE_SHOWN][:1]
    training = run.training
    rate = f"--decay-share {training.optimizer.decay_share} --learning-rate {training.optimizer.learning_rate}"
    command = f"--steps {training.steps} {rate} --seed {training.seed}"
    if training.start:
        command += f" --start {' '.join(training.start)}"
    settings = {**asdict(run.shape), **asdict(training)}
    table = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    sources = "\n".join(f"* {source}" for source in sorted({document.source for document in run.text.documents}))
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    write_whole(
        run.out / "model/README.md",
        f"""# tiny_python

A Llama of {num_parameters / 1e6:.2f} M parameters that writes Python functions, after a fashion, and answers with one
when a user asks for it. It exists so that `draftsmith quickstart` has a real target with nothing to download; it is of
no other use.

* Held-out loss: {held_out.per_token:.3f} nats a token, {held_out.per_byte:.3f} nats a byte, on one file in sixteen of
  the standard library of Python {platform.python_version()}. What resembles these files was left out of the text.
* Trained on {run.num_tokens / 1e6:.1f} M tokens ({run.num_tokens / run.rows.num_tokens:.1f} epochs of
  {run.rows.num_tokens / 1e6:.1f} M) in {run.seconds / 3600:.1f} hours on {machine(run.model.device)}
  with torch {torch.__version__}.
* Text: sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}..., functions and dialogues made of them, from the
  sources below; the last {training.steps - run.decay_start} steps read more of the standard library.
* Commands: `python tools/tiny_target_text.py --out TEXT.jsonl`, and
  `python tools/train_tiny_target.py --text TEXT.jsonl --out DIR {command}`

| setting | value |
|---|---|
{table}

A greedy completion on a held-out file, and an answer:

```
{completion(run, Prompt(text=function_prompt(function)))}

{completion(run, Prompt(messages=list(question)))}
```

## Sources and their licences

{sources}
""",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--decay-share", type=float, default=Training().optimizer.decay_share)
    parser.add_argument("--learning-rate", type=float, default=Training().optimizer.learning_rate)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=get_args(Precision), help="bf16 is faster on CPUs with AMX")
    parser.add_argument("--start", nargs="+", default=[], help="models whose mean is taken in place of new weights")
    parser.add_argument("--seed", type=int, default=Training.seed, help="with --start: one that the model has not seen")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape, training = Shape(), Training(steps=args.steps, precision=args.precision, start=args.start, seed=args.seed)
    training.optimizer.decay_share, training.optimizer.learning_rate = args.decay_share, args.learning_rate
    if args.device != "cpu":
        training.tokens_per_pass = training.tokens_per_step  # a GPU has no caches that a step should fit
    if args.start:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.start[0])
    else:
        tokenizer = train_tokenizer(stdlib_functions(held_out=False), shape)
    text = Text(list(read_documents(args.text)), stdlib_functions(held_out=True), tokenizer)
    run = TargetRun(text, args.out, shape, training, args.device)
    run.train()
    write_card(run, args.text)


if __name__ == "__main__":
    main()
