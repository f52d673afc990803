#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include <ATen/Parallel.h>

#include <string_view>
#include <vector>

namespace {

/// Options of Catch2 2, as the scripts give them, in the words of the version that is here.
std::vector<const char*> in_words_of_this_version(int argc, char** argv) {
  std::vector<const char*> words(argv, argv + argc);
  if (CATCH_VERSION_MAJOR < 3) return words;
  for (size_t i = 1; i < words.size(); ++i)
    if (std::string_view(words[i]) == "--list-test-names-only") {
      words[i] = "--list-tests";
      words.insert(words.begin() + static_cast<std::ptrdiff_t>(i), {"--verbosity", "quiet"});
      i += 2;
    }
  words.push_back("--allow-running-no-tests");
  return words;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);  // ranks are threads already
  const auto words = in_words_of_this_version(argc, argv);
  return Catch::Session().run(static_cast<int>(words.size()), words.data());
}
