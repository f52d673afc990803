// Saves the checkpoints FOLDER/c again and again on two ranks, with values that tell which save they are from, until it
// is killed or has saved COUNT: for the test that kills it, and for Python to read. After each save, and before the
// first, it prints a line. With a fourth argument it is refused to exchange two folders in one step, as by a file system
// that cannot.
#include <ATen/Parallel.h>
#include <fsdp/fsdp.hpp>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <torch/torch.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(300, 700));
    second = register_module("second", torch::nn::Linear(700, 301));
    table = register_buffer("table", torch::arange(7));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor table;
};
TORCH_MODULE(Net);

void run(const std::shared_ptr<fsdp::Communicator>& world, const std::string& folder, int begin, int count) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Net net;
  torch::NoGradGuard no_grad;
  fsdp::fully_shard(net->first, {.mesh = mesh});
  fsdp::fully_shard(net, {.mesh = mesh, .shard_placement_fn = [](const std::string&, const at::Tensor& parameter) {
                            return fsdp::Shard{parameter.dim() - 1};
                          }});
  torch::optim::AdamW optimizer(net->parameters());
  for (int save = begin; save < begin + count; ++save) {
    for (auto& parameter : net->parameters()) parameter.fill_(save);
    if (world->rank() == 0) {
      std::puts("next");
      std::fflush(stdout);
    }
    fsdp::save_checkpoint(folder + "/c", {net, optimizer, std::to_string(save)},
                          {.world = world, .max_file_bytes = 1'000'000});
  }
}

/// From now on the system answers RENAME_EXCHANGE with EINVAL.
bool refuse_exchanges() {
  const auto flags = static_cast<uint32_t>(offsetof(seccomp_data, args) + 4 * sizeof(uint64_t));
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, flags),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, RENAME_EXCHANGE, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::fputs("usage: fsdp_checkpoint_saver FOLDER FIRST COUNT [two-renames]\n", stderr);
    return 2;
  }
  if (argc == 5 && !refuse_exchanges()) {
    std::perror("fsdp_checkpoint_saver: exchanges cannot be refused");
    return 3;
  }
  at::set_num_threads(1);
  fsdp::run_ranks(2, [&](const std::shared_ptr<fsdp::Communicator>& world) { run(world, argv[1], std::atoi(argv[2]), std::atoi(argv[3])); });
  return 0;
}
