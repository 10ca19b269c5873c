#include "arrays.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>

#include <nanobind/stl/string.h>

#include "base/huge_pages.h"
#include "errors.h"

namespace gradwire::python {
namespace {

namespace nb = nanobind;

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::str(nb::handle(object.type()).attr("__name__")));
}

std::string dtype_name(nb::dlpack::dtype dtype) {
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bool)) return "bool";
  if (dtype.code >= std::size(kKinds)) return "an unknown dtype";
  return kKinds[dtype.code] + std::to_string(dtype.bits);
}

// The object's own name of its dtype, or "" if it has none. nanobind has no names for dtypes that
// it can't take (big-endian, records, text).
std::string own_dtype_name(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  return dtype.is_none() ? "" : nb::cast<std::string>(nb::str(dtype));
}

// Whether it is a NumPy array whose dtype is another package's. Its name takes code in Python, in
// which a daemon thread may be ended while the interpreter exits; its kind takes none.
bool has_foreign_dtype(nb::handle array) {
  const nb::object dtype = nb::getattr(array, "dtype", nb::none());
  const nb::object kind = nb::getattr(dtype, "kind", nb::none());
  return nb::isinstance<nb::str>(kind) && nb::cast<std::string>(kind) == "V";
}

// nanobind reads the strides of every buffer, but ctypes arrays leave them out. A memoryview adds
// them.
nb::object with_strides(nb::handle object) {
  if (nb::hasattr(object, "__dlpack__") || PyObject_CheckBuffer(object.ptr()) == 0) {
    return nb::borrow(object);
  }
  nb::object view = nb::steal(PyMemoryView_FromObject(object.ptr()));
  if (!view.is_valid()) throw nb::python_error();
  return view;
}

// The memory of the storage behind a PyTorch tensor.
struct Storage {
  uintptr_t begin;
  uint64_t size;
};

// Raises for tensors whose memory does not hold their values. DLPack hands out their addresses all
// the same: of storages that were freed, of tensors that only describe values (FakeTensor, wrappers
// of other tensors), and of tensors whose values are the negatives of those in memory. Returns
// nothing for objects that are no tensors of PyTorch.
std::optional<Storage> check_storage(nb::handle object) {
  if (!nb::hasattr(object, "untyped_storage")) return std::nullopt;
  std::optional<Storage> found;
  bool negative = false;
  try {
    const nb::object storage = object.attr("untyped_storage")();
    // The storage of a FakeTensor is on no device, whatever the tensor says.
    if (nb::object(storage.attr("device")).equal(object.attr("device"))) {
      found = {.begin = nb::cast<uintptr_t>(storage.attr("data_ptr")()),
               .size = nb::cast<uint64_t>(storage.attr("nbytes")())};
    }
    negative = nb::cast<bool>(object.attr("is_neg")());
  } catch (const nb::python_error&) {
    found.reset();  // PyTorch refuses to say where the values are, because they are nowhere
  }
  if (!found || (found->begin == 0 && found->size > 0)) {
    raise(StatusCode::kInvalidArgument,
          "this " + class_name(object) +
              " has no memory with its values; pass a plain tensor of them");
  }
  if (negative) {
    raise(StatusCode::kInvalidArgument,
          "the values of this " + class_name(object) +
              " are the negatives of those in its memory; pass a copy (tensor.resolve_neg())");
  }
  return found;
}

// size: bytes from `data` on.
void check_bounds(const std::optional<Storage>& storage, uintptr_t data, uint64_t size,
                  nb::handle object) {
  if (size == 0) return;
  const uintptr_t begin = storage ? storage->begin : data;
  const uint64_t room = storage ? storage->size : data == 0 ? 0 : size;
  if (data < begin || data - begin > room || size > room - (data - begin)) {
    raise(StatusCode::kInvalidArgument,
          "the " + std::to_string(size) + " bytes of this " + class_name(object) +
              "'s values reach beyond its memory of " + std::to_string(room) +
              " bytes, which was freed or made smaller; allocate it again and fill it");
  }
}

template <typename Array>
bool is_contiguous(const Array& array) {
  if (array.size() == 0) return true;
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(i));
  }
  return true;
}

constexpr nb::dlpack::dtype kBfloat16 = {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16,
                                         1};
constexpr nb::dlpack::dtype kFloat16 = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};

// `wanted` names the array in messages: "a float32 array".
template <typename Array>
Array take_array(nb::handle given, std::initializer_list<nb::dlpack::dtype> dtypes,
                 const std::string& wanted) {
  const std::optional<Storage> storage = check_storage(given);
  if (!storage && nb::hasattr(given, "harden_mask")) {
    raise(StatusCode::kInvalidArgument,
          "the values behind the mask of this " + class_name(given) +
              " would go too; pass a plain array (array.filled(0), array.compressed())");
  }
  const nb::object object = with_strides(given);
  Array array;
  if (!nb::try_cast<Array>(object, array, false)) {
    PyErr_Clear();
    nb::ndarray<nb::ro> readable;
    if (nb::try_cast<nb::ndarray<nb::ro>>(object, readable, false)) {
      raise(StatusCode::kInvalidArgument, "the output must be writable; this array is read-only");
    }
    PyErr_Clear();
    const std::string found = own_dtype_name(given);
    if (std::ranges::any_of(dtypes, [&](nb::dlpack::dtype dtype) {
          return found == dtype_name(dtype) || found == "torch." + dtype_name(dtype);
        })) {
      raise(StatusCode::kInvalidArgument,
            "this " + class_name(given) +
                " gives no access to values in CPU memory; pass a CPU copy");
    }
    if (!found.empty()) {
      raise(StatusCode::kUnsupportedDtype, "expected " + wanted + ", got dtype " + found);
    }
    raise(StatusCode::kInvalidArgument,
          "expected " + wanted + " (buffer protocol or DLPack), got " + class_name(given));
  }
  if (std::ranges::find(dtypes, array.dtype()) == dtypes.end()) {
    raise(StatusCode::kUnsupportedDtype,
          "expected " + wanted + ", got dtype " + dtype_name(array.dtype()));
  }
  if (array.device_type() != nb::device::cpu::value) {
    raise(StatusCode::kInvalidArgument,
          "the array is not in CPU memory; this build works on CPU tensors");
  }
  if (reinterpret_cast<uintptr_t>(array.data()) % (array.dtype().bits / 8) != 0) {
    raise(StatusCode::kInvalidArgument, "the array is not aligned; pass a copy (array.copy())");
  }
  if (!is_contiguous(array)) {
    raise(StatusCode::kInvalidArgument,
          "the array is not C-contiguous; pass a contiguous copy (numpy.ascontiguousarray, "
          "tensor.contiguous())");
  }
  check_bounds(storage, reinterpret_cast<uintptr_t>(array.data()), array.nbytes(), given);
  return array;
}

}  // namespace

template <typename T>
HostArray<T>::HostArray(nb::handle object)
    : array_(take_array<decltype(array_)>(object, {nb::dtype<T>()},
                                          "a " + dtype_name(nb::dtype<T>()) + " array")) {}

template class HostArray<const float>;
template class HostArray<float>;
template class HostArray<uint8_t>;

ValueInput::ValueInput(nb::handle given, std::optional<Dtype> bits) {
  nb::object object = nb::borrow(given);
  // NumPy gives no access to values of ml_dtypes, but to their bits.
  if (!bits && has_foreign_dtype(given) && own_dtype_name(given) == "bfloat16") {
    object = given.attr("view")("uint16");
    bits = Dtype::kBfloat16;
  }
  if (bits) {
    array_ = take_array<nb::ndarray<nb::ro>>(object, {nb::dtype<uint16_t>()},
                                             "a uint16 array, as dtype= says");
    dtype_ = *bits;
    return;
  }
  array_ = take_array<nb::ndarray<nb::ro>>(object, {nb::dtype<float>(), kBfloat16, kFloat16},
                                           "a float32, bfloat16 or float16 array");
  const nb::dlpack::dtype found = array_.dtype();
  dtype_ = found == kBfloat16  ? Dtype::kBfloat16
           : found == kFloat16 ? Dtype::kFloat16
                               : Dtype::kFloat32;
}

InputView ValueInput::values() const {
  if (dtype_ == Dtype::kFloat32) {
    return std::span(static_cast<const float*>(array_.data()), array_.size());
  }
  return {dtype_, std::span(static_cast<const uint16_t*>(array_.data()), array_.size())};
}

std::span<const std::byte> ValueInput::bytes() const {
  return {static_cast<const std::byte*>(array_.data()), array_.nbytes()};
}

ByteInput::ByteInput(nb::handle object) {
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) {
      PyErr_Clear();
      raise(StatusCode::kInvalidArgument, "the bytes must be contiguous");
    }
    bytes_ = {static_cast<const std::byte*>(buffer_.buf), static_cast<size_t>(buffer_.len)};
    return;
  }
  array_ =
      take_array<nb::ndarray<nb::ro>>(object, {nb::dtype<uint8_t>()}, "bytes or a uint8 array");
  bytes_ = {static_cast<const std::byte*>(array_.data()), array_.size()};
}

ByteInput::~ByteInput() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

template <typename T>
NumpyArray<T> new_array(size_t n) {
  auto values = std::make_unique_for_overwrite<T[]>(n);
  T* data = values.get();
  advise_huge_pages(data, n * sizeof(T));
  nb::capsule owner(values.release(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return NumpyArray<T>(data, {n}, owner);
}

template NumpyArray<float> new_array(size_t n);
template NumpyArray<uint16_t> new_array(size_t n);

void require_apart(std::span<const std::byte> read, std::span<const std::byte> written) {
  const std::less<const std::byte*> before;
  if (before(read.data(), written.data() + written.size()) &&
      before(written.data(), read.data() + read.size())) {
    raise(StatusCode::kInvalidArgument,
          "what is read and what is written lie in the same memory; pass an output of its own");
  }
}

void note_write(nb::handle tensor) {
  if (!nb::hasattr(tensor, "untyped_storage")) return;
  nb::module_::import_("torch.autograd.graph").attr("increment_version")(tensor);
}

NumpyArray<float> to_numpy(const std::vector<float>& values) {
  NumpyArray<float> array = new_array<float>(values.size());
  std::ranges::copy(values, array.data());
  return array;
}

}  // namespace gradwire::python
