"""Lightning with AdamW, whose changes are compressed.

python examples/recipes/lightning_adamw.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.contrib.lightning import GradwireStrategy

EPOCHS = 8


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.losses: list[float] = []

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_epoch_end(self):
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        self.print(f"epoch {self.current_epoch + 1}: loss {loss:.3f}")


lightning.seed_everything(0)
inputs = torch.randn(1600, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
strategy = GradwireStrategy(every=1, process_group_backend="gloo")  # the new line
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    gradient_clip_val=1.0,
    max_epochs=EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True))
if trainer.is_global_zero:
    print(strategy.way.stats())
torch.distributed.destroy_process_group()
