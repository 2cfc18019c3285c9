"""LoRA through PEFT, in a loop of one's own."""

from __future__ import annotations

import accelerate
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_language_model import Rows, model

accelerator = Accelerator(cpu=True)
base = model()
adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
frozen = {name: value.clone() for name, value in adapted.named_parameters() if not value.requires_grad}
optimizer = torch.optim.AdamW([value for value in adapted.parameters() if value.requires_grad], lr=5e-2)
loader = torch.utils.data.DataLoader(Rows(64), batch_size=4, shuffle=True)
adapted, optimizer, loader = accelerator.prepare(adapted, optimizer, loader)
losses = []
for _ in range(4):
    for batch in loader:
        loss = adapted(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
unwrapped = accelerator.unwrap_model(adapted)
assert all(torch.equal(value, frozen[name]) for name, value in unwrapped.named_parameters() if name in frozen)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    unwrapped.save_pretrained("adapter")
accelerator.wait_for_everyone()
loaded = PeftModel.from_pretrained(model(), "adapter")
with torch.no_grad():
    row = {name: value[None] for name, value in Rows(1)[0].items()}
    same = torch.allclose(loaded(**row).logits, unwrapped(**row).logits, atol=1e-5)
print(
    accelerator.process_index, accelerator.num_processes, accelerate.__file__, losses[0], losses[-1], same, flush=True
)
accelerator.end_training()
