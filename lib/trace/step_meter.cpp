#include "trace/step_meter.hpp"

namespace fsdp {

void StepMeter::begin_step() {
  before_step_ = total_;
  step_peak_bytes_ = unsharded_bytes_;
  step_wait_ns_ = 0;
}

void StepMeter::end_step() {
  last_step_ = {.all_gathers = total_.all_gathers - before_step_.all_gathers,
                .gathered_bytes = total_.gathered_bytes - before_step_.gathered_bytes,
                .reductions = total_.reductions - before_step_.reductions,
                .reduced_bytes = total_.reduced_bytes - before_step_.reduced_bytes,
                .communicated_bytes = total_.communicated_bytes - before_step_.communicated_bytes,
                .buffer_bytes = total_.buffer_bytes - before_step_.buffer_bytes,
                .offloaded_bytes = total_.offloaded_bytes - before_step_.offloaded_bytes};
  last_step_peak_bytes_ = step_peak_bytes_;
}

}  // namespace fsdp
