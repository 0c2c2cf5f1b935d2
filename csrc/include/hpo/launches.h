// Counts kernel launches, emulated or real, by kernel name. It is host code, so that bindings include it without CUDA.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace hpo {

// One per HPO_LAUNCH in the source, created at the first launch; the list lives as long as the process.
class LaunchCounter {
 public:
  // instance: the kernel with the values of its template's parameters, where it is known.
  explicit LaunchCounter(const char* kernel, const char* instance = nullptr)
      : kernel_(kernel), instance_(instance ? instance : kernel), next_(first_.load()) {
    while (!first_.compare_exchange_weak(next_, this)) {
    }
  }
  LaunchCounter(const LaunchCounter&) = delete;
  LaunchCounter& operator=(const LaunchCounter&) = delete;

  void add() { launches_.fetch_add(1, std::memory_order_relaxed); }

  // Launches since the module was loaded, by kernel name, all specialisations of a template together.
  static std::map<std::string, int64_t> all() {
    return by([](const LaunchCounter& counter) { return name(counter.kernel_); });
  }

  // The same, each specialisation by itself.
  static std::map<std::string, int64_t> of_instances() {
    return by([](const LaunchCounter& counter) { return std::string(counter.instance_); });
  }

 private:
  template <class Key>
  static std::map<std::string, int64_t> by(Key key) {
    std::map<std::string, int64_t> launches;
    for (const LaunchCounter* counter = first_.load(); counter; counter = counter->next_) {
      launches[key(*counter)] += counter->launches_.load(std::memory_order_relaxed);
    }
    return launches;
  }

  // "(sweep<float, 256>)", as HPO_LAUNCH sees it, is the kernel "sweep".
  static std::string name(const std::string& text) {
    const size_t start = text.find_first_not_of("( ");
    return text.substr(start, text.find_first_of("< )", start) - start);
  }

  inline static std::atomic<LaunchCounter*> first_{nullptr};
  const char *const kernel_, *const instance_;
  LaunchCounter* next_;
  std::atomic<int64_t> launches_{0};
};

}  // namespace hpo
