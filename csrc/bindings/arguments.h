// Arguments from Python: tensors are checked before they come here, and are asked for the address of their memory alone.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <stdexcept>
#include <string>
#include <vector>

#include "hpo/api.h"

namespace hpo::bindings {

namespace py = pybind11;

// The address of a tensor's memory; null for None.
struct Address {
  uintptr_t value = 0;
};

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address.value);
}

inline uintptr_t call_for_number(py::handle tensor, PyObject* method) {
  const py::object number = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), method));
  if (!number) throw py::error_already_set();
  const uintptr_t value = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// Kernels take a null pointer for a tensor that is not given: one with elements and without memory never reaches them.
inline Address address_of(py::handle tensor, const char* name = "a tensor") {
  if (tensor.is_none()) return {};
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const numel = PyUnicode_InternFromString("numel");
  const Address address{call_for_number(tensor, data_ptr)};
  if (address.value == 0 && call_for_number(tensor, numel) != 0) {
    throw py::value_error(std::string(name) + ": expected a tensor with memory, got elements without any; was it freed?");
  }
  return address;
}

inline Address address_at(const py::tuple& tensors, int at) { return address_of(PyTuple_GET_ITEM(tensors.ptr(), at)); }

}  // namespace hpo::bindings

template <>
struct pybind11::detail::type_caster<hpo::bindings::Address> {
  PYBIND11_TYPE_CASTER(hpo::bindings::Address, const_name("Tensor | None"));

  bool load(handle tensor, bool) {
    value = hpo::bindings::address_of(tensor);
    return true;
  }
};

namespace hpo::bindings {

inline void check(int status) {
  if (status != 0) throw std::runtime_error(std::string("hpo_core: ") + hpo_error(status));
}

// Other threads of Python may go on meanwhile.
template <class Call>
void run(const Call& call) {
  int status;
  {
    py::gil_scoped_release release;
    status = call();
  }
  check(status);
}

// Kernels on the host validate offsets, and read them again: they get a copy, which no thread rewrites in between.
class Offsets {
 public:
  Offsets() = default;
  Offsets(Address from, int64_t rows) : Offsets(pointer<const int64_t>(from), rows) {}
  Offsets(const int64_t* from, int64_t rows) : data_(from) {
#ifdef HPO_ON_HOST
    if (data_) copy_.assign(data_, data_ + rows + 1), data_ = copy_.data();
#else
    (void)rows;
#endif
  }
  const int64_t* data() const { return data_; }

 private:
  const int64_t* data_ = nullptr;
  std::vector<int64_t> copy_;
};

// Asks for large pages, of memory of this process that nothing has touched: a kernel may go over a workspace once, and faults
// on its small pages then take longer than the kernel. Nothing depends on the answer.
inline void advise_large_pages(Address memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (memory.value + kPage - 1) / kPage * kPage, end = (memory.value + uintptr_t(bytes)) / kPage * kPage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace hpo::bindings
