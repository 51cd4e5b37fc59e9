// The operators of every kernels/<operation>/cpu*.cpp, registered with torch when the library is loaded.
#include "levels.h"
#include "torch_abi.h"

namespace easytorch {

void register_causal_conv1d(Library& library);
void register_causal_conv1d_backward(Library& library);
void register_cross_entropy(Library& library);
void register_decode(Library& library);
void register_decode_codes(Library& library);
void register_experts_step(Library& library);
void register_flash(Library& library);
void register_flash_backward(Library& library);
void register_gated_delta_rule(Library& library);
void register_gated_delta_rule_backward(Library& library);
void register_glu(Library& library);
void register_decoder_step(Library& library);
void register_layer_norm(Library& library);
void register_linear(Library& library);
void register_multi_latent(Library& library);
void register_multi_latent_pages(Library& library);
void register_quantized_matmul(Library& library);
void register_ragged_page(Library& library);
void register_rms_norm(Library& library);
void register_rotary(Library& library);
void register_ssm1(Library& library);
void register_ssm1_backward(Library& library);
void register_ssm2(Library& library);
void register_ssm2_backward(Library& library);

namespace {

struct Registration {
  Registration() {
    register_causal_conv1d(library);
    register_causal_conv1d_backward(library);
    register_cross_entropy(library);
    register_decode(library);
    register_decode_codes(library);
    register_experts_step(library);
    register_flash(library);
    register_flash_backward(library);
    register_gated_delta_rule(library);
    register_gated_delta_rule_backward(library);
    register_glu(library);
    register_decoder_step(library);
    register_layer_norm(library);
    register_linear(library);
    register_multi_latent(library);
    register_multi_latent_pages(library);
    register_quantized_matmul(library);
    register_ragged_page(library);
    register_rms_norm(library);
    register_rotary(library);
    register_ssm1(library);
    register_ssm1_backward(library);
    register_ssm2(library);
    register_ssm2_backward(library);
  }
  Library library;
};

const Registration registration;

}  // namespace
}  // namespace easytorch

// The level of this CPU, see levels.h.
extern "C" int64_t easytorch_cpu_level() { return easytorch::best_level(); }
