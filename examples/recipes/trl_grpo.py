"""TRL's GRPOTrainer: another process generates text, and follows the trainer's weights.

python examples/recipes/trl_grpo.py

The task is to count on from a digit. Everything is made on the spot and runs on a CPU.
"""

import multiprocessing
import tempfile
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from gradwire.weights import Publisher, Subscriber

DIGITS, LENGTH = 10, 8  # digits of a completion
PAD, END = DIGITS, DIGITS + 1  # further tokens


def make_model() -> GPT2LMHeadModel:
    special = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": END}
    config = GPT2Config(vocab_size=DIGITS + 2, n_embd=64, n_layer=2, n_head=2, **special)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def generate(store: str, requests: Connection) -> None:
    """The process that generates: it answers prompts, lists of tokens of the same length."""
    torch.set_num_threads(1)
    model, subscriber = make_model().bfloat16().eval(), Subscriber(store)
    while (prompts := requests.recv()) is not None:
        subscriber.fetch()
        subscriber.apply_(model)
        asked = torch.tensor(prompts)
        tokens = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            do_sample=True,
            top_k=0,
            max_new_tokens=LENGTH,
            min_new_tokens=LENGTH,
        )
        requests.send((subscriber.version, tokens[:, len(prompts[0]) :].tolist()))


class Publish(TrainerCallback):
    """Publishes the model after each step. Of several ranks with the whole model one does so."""

    def __init__(self, store: str) -> None:
        self.publisher = Publisher(store, dtype="bfloat16")

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.on_step_end(args, state, control, **given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.is_world_process_zero:
            self.published = self.publisher.publish(given["model"])


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of digits that are the one before plus one."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        digits = [int(word) for word in f"{prompt} {completion}".split() if word.isdigit()]
        right = sum((a + 1) % DIGITS == b for a, b in pairwise(digits))
        scores.append(right / LENGTH)
    return scores


def train() -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    words = Tokenizer(
        models.WordLevel({str(n): n for n in range(DIGITS)} | {"<pad>": PAD, "<end>": END})
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/policy"
        publish = Publish(store)

        def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
            ids = tokenizer(prompts)["input_ids"]
            here.send(ids)
            version, answers = here.recv()
            assert version == publish.published.version
            return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}

        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=128,
            num_generations=16,
            max_completion_length=LENGTH,
            learning_rate=3e-3,
            max_steps=60,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            make_model(),
            reward,
            config,
            train_dataset=Dataset.from_list([{"prompt": str(n % DIGITS)} for n in range(80)]),
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[publish],
        )
        worker = context.Process(target=generate, args=(store, there), daemon=True)
        worker.start()
        trainer.train()
        here.send(None)
        worker.join()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {float(entry['reward']):.2f}")
    last = publish.published
    share = f"{last.share_changed:.0%} of the weights"
    print(f"version {last.version}: {last.bytes} bytes, {share} changed")


if __name__ == "__main__":
    train()
