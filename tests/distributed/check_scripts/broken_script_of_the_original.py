# expects: mismatched-collective ranks-diverge
# flags: --alias --wait 8
from accelerate import Accelerator

accelerator = Accelerator()
if accelerator.is_main_process:
    accelerator.wait_for_everyone()
