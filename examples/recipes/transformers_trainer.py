"""Hugging Face Trainer: the changes of its AdamW are compressed.

torchrun --nproc-per-node 2 examples/recipes/transformers_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire.contrib.transformers import GradwireCallback


class Counting(Dataset):
    """Sequences that count up from a random number, modulo 64."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(64, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(32)) % 64
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=16,
        num_train_epochs=2,
        learning_rate=3e-3,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    gradwire = GradwireCallback(every=2)
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[gradwire])
    trainer.train()

if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.3f}")
    print(gradwire.stats())
torch.distributed.destroy_process_group()
