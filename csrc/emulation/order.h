// The order of blocks and threads in a launch, from HPO_EMULATION_ORDER.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace hpo::emulation {

class Order {
 public:
  bool is_reverse = false, is_random = false;

  void read() {
    const char* variable = std::getenv("HPO_EMULATION_ORDER");
    const std::string order = variable ? variable : "forward";
    is_reverse = order == "reverse";
    is_random = order.rfind("random:", 0) == 0;
    if (is_random) random_.seed(unsigned(std::strtoul(order.c_str() + 7, nullptr, 10)));
    if (!is_random && !is_reverse && order != "forward") {
      throw std::runtime_error("HPO_EMULATION_ORDER is forward, reverse or random:SEED, not " + order);
    }
  }

  unsigned draw() { return unsigned(random_()); }

  void shuffle(std::vector<size_t>& numbers) { std::shuffle(numbers.begin(), numbers.end(), random_); }

  static std::vector<size_t> ascending(size_t count) {
    std::vector<size_t> numbers(count);
    for (size_t i = 0; i < count; ++i) numbers[i] = i;
    return numbers;
  }

  std::vector<size_t> permutation(size_t count) {
    std::vector<size_t> numbers = ascending(count);
    if (is_reverse) std::reverse(numbers.begin(), numbers.end());
    if (is_random) shuffle(numbers);
    return numbers;
  }

 private:
  std::minstd_rand random_;
};

}  // namespace hpo::emulation
