// The factor by which a loss is multiplied so that small fp16 gradients do not vanish, and how it adapts: it grows
// after a number of steps without an overflow and shrinks after each overflow. (Micikevicius et al., "Mixed Precision
// Training", 2018; the rules and the state are those of torch.amp.GradScaler.)
#pragma once

namespace accelerate_cpp::amp {

struct LossScaleOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;   // above 1
  double backoff_factor = 0.5;  // between 0 and 1
  int growth_interval = 2000;   // steps without an overflow before the scale grows
};

class LossScale {
 public:
  // Throws InvalidArgument when an option is out of its range.
  explicit LossScale(const LossScaleOptions& options);

  // Always positive and finite, and so is its inverse.
  double value() const { return scale_; }
  // Steps without an overflow since the scale has last changed.
  int growth_tracker() const { return growth_tracker_; }
  const LossScaleOptions& options() const { return options_; }

  // After a step: whether some gradient was not finite.
  void update(bool overflow);

  // Starts over from `scale`. Throws InvalidArgument unless it is positive and finite.
  void set(double scale);

  // Continues from a saved state. Throws InvalidArgument when it is out of range.
  void restore(double scale, int growth_tracker, const LossScaleOptions& options);

 private:
  LossScaleOptions options_;
  double scale_;
  int growth_tracker_ = 0;
};

}  // namespace accelerate_cpp::amp
