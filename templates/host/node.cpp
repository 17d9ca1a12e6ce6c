// Plain calls, and their node of autograd, without an interpreter in between: what a node in Python
// asks for again each time stands in a plan, made once for each combination of shapes (flashgen/op/node.py, which
// also says in what order its words come). What a plan is not for goes to Python, where everything is taken.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

// Slots of a pass, in the order of the words: where the pointers lie in `struct Arguments`.
enum Slot { WORKSPACE, Q, K, V, O, LSE, PARTS, D_O, D_LSE, DQ, DK, DV, SLOTS };
using Pointers = std::array<const void*, SLOTS>;

// Params of a call.
using Numbers = std::vector<at::Tensor>;

constexpr size_t MOST_BYTES = 4096;  // of `struct Arguments`
constexpr int MOST_MAPS = 4, MAP_BYTES = 192, MAP_WORDS = 128;
constexpr int64_t SPARE_BYTES = 1 << 22;
constexpr size_t MOST_BACKWARDS = 8;  // of one plan

class Words {
 public:
  Words(const char* bytes, Py_ssize_t size) : at_(bytes), end_(bytes + size) {}

  int64_t next() {
    TORCH_CHECK(at_ + sizeof(int64_t) <= end_, "a plan of a call ends too early");
    int64_t word;
    std::memcpy(&word, at_, sizeof word);
    at_ += sizeof word;
    return word;
  }

  template <class T>
  T function() {
    return reinterpret_cast<T>(static_cast<intptr_t>(next()));
  }

  std::vector<int64_t> list() {
    std::vector<int64_t> found(static_cast<size_t>(next()));
    for (int64_t& word : found) word = next();
    return found;
  }

 private:
  const char* at_;
  const char* end_;
};

// What the driver of a GPU is asked for; null on a CPU.
struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*clear)(unsigned long long, unsigned char, size_t, void*);
  int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                int, int, int);
  int32_t (*stream)(int32_t, void**);

  explicit Driver(Words& words)
      : launch(words.function<decltype(launch)>()),
        clear(words.function<decltype(clear)>()),
        encode(words.function<decltype(encode)>()),
        stream(words.function<decltype(stream)>()) {}
};

// flashgen/hosts/tensor_maps.py
struct Map {
  size_t slot;
  int element, swizzle;
  std::vector<uint64_t> extents, strides;
  std::vector<uint32_t> box, ones;
  int32_t slabs[2];

  explicit Map(Words& words) : slot(static_cast<size_t>(words.next())) {
    element = static_cast<int>(words.next());
    swizzle = static_cast<int>(words.next());
    for (int64_t each : words.list()) extents.push_back(static_cast<uint64_t>(each));
    for (int64_t each : words.list()) strides.push_back(static_cast<uint64_t>(each));
    for (int64_t each : words.list()) box.push_back(static_cast<uint32_t>(each));
    ones.assign(extents.size(), 1);
    for (int32_t& each : slabs) each = static_cast<int32_t>(words.next());
  }
};

struct Launch {
  void* function;
  unsigned grid, threads, shared_bytes;
  std::vector<Map> maps;

  explicit Launch(Words& words) : function(words.function<void*>()) {
    grid = static_cast<unsigned>(words.next());
    threads = static_cast<unsigned>(words.next());
    shared_bytes = static_cast<unsigned>(words.next());
    for (int64_t left = words.next(); left > 0; --left) maps.emplace_back(words);
  }
};

struct Clear {
  int64_t offset, size;
};

// One pass: the bytes of its arguments but for pointers, and what is started.
struct Pass {
  int64_t workspace_bytes;
  std::array<size_t, SLOTS> offsets;
  std::string arguments;
  void (*function)(const void*);  // of a CPU's library
  std::vector<Clear> clears;
  std::vector<Launch> launches;

  Pass(Words& words, std::string bytes) : workspace_bytes(words.next()), arguments(std::move(bytes)) {
    TORCH_CHECK(arguments.size() <= MOST_BYTES, "struct Arguments is too large");
    for (size_t& each : offsets) each = static_cast<size_t>(words.next());
    function = words.function<decltype(function)>();
    for (int64_t left = words.next(); left > 0; --left) {
      int64_t offset = words.next();
      clears.push_back({offset, words.next()});
    }
    for (int64_t left = words.next(); left > 0; --left) launches.emplace_back(words);
  }
};

// q, k, v or d_o as a plan takes them, and what it gives. No strides: contiguous.
struct Operand {
  std::vector<int64_t> sizes, strides;

  explicit Operand(Words& words) : sizes(words.list()), strides(words.list()) {}

  bool is(const at::Tensor& x) const {
    return x.sizes() == at::IntArrayRef(sizes) && (strides.empty() ? x.is_contiguous() : x.strides() == at::IntArrayRef(strides));
  }
  at::Tensor empty(const at::Tensor& like) const { return at::empty_strided(sizes, strides, like.options()); }
};

// A backward pass for gradients of o that lie like this.
struct Backward {
  Operand d_o;
  Pass pass;

  Backward(Words& words, std::string bytes) : d_o(words), pass(words, std::move(bytes)) {}
};

struct Plan {
  at::ScalarType type;
  bool has_lse;
  int threads;
  uintptr_t alignment;
  std::array<Operand, 3> operands;  // q, k and v
  Operand o;
  std::array<Operand, 3> gradients;  // of q, k and v
  int64_t rows, lse_at;  // numbers of float32: the rows, and where lse begins behind the parts
  std::vector<int64_t> places, types;  // of params, each a number of 32 bits: where in `struct Arguments`, what it is
  Driver driver;
  Pass forward;
  std::array<std::unique_ptr<const Backward>, MOST_BACKWARDS> backwards;
  std::atomic<size_t> known{0};  // of these; those that come are added by who holds the interpreter's lock
  PyObject* slow;                // what Python does in the place of `backward`
  c10::Device device;
  c10::DispatchKeySet keys;  // of a plain tensor there
  c10::DispatchKeySet keys_of_numbers = at::empty({0}, at::kCPU).key_set();
  pid_t process = getpid();

  Plan(Words& words, std::string of_forward, PyObject* in_python, const at::Tensor& plain)
      : type(static_cast<at::ScalarType>(words.next())),
        has_lse(words.next() != 0),
        threads(static_cast<int>(words.next())),
        alignment(static_cast<uintptr_t>(words.next())),
        operands{Operand(words), Operand(words), Operand(words)},
        o(words),
        gradients{Operand(words), Operand(words), Operand(words)},
        rows(words.next()),
        lse_at(words.next()),
        places(words.list()),
        types(words.list()),
        driver(words),
        forward(words, std::move(of_forward)),
        slow(in_python),
        device(plain.device()),
        keys(plain.key_set()) {
    Py_INCREF(slow);
  }

  // Whether memory can be read as it is: nothing wraps the tensor, and it lies as was planned for.
  bool takes(const at::Tensor& x, const Operand& operand) const {
    return x.defined() && x.key_set() == keys && x.scalar_type() == type && x.device() == device && operand.is(x) &&
           reinterpret_cast<uintptr_t>(x.const_data_ptr()) % alignment == 0 && x.const_data_ptr() != nullptr;
  }

  // Whether a param can be read as it is: one number on the CPU, which nothing is to be learned of.
  bool takes_number(const at::Tensor& x, size_t n) const {
    return x.defined() && x.key_set() == keys_of_numbers && static_cast<int64_t>(x.scalar_type()) == types[n] &&
           x.dim() == 0 && !x.requires_grad();
  }

  // Whether this is the process, with as many threads, that it was made for: a forked child has none of its parent's.
  bool is_of_here() const { return threads == at::get_num_threads() && process == getpid(); }

  // That of gradients like these, if it is known.
  const Pass* backward(const at::Tensor& d_o) const {
    size_t count = known.load(std::memory_order_acquire);
    for (size_t n = 0; n < count; ++n) {
      if (takes(d_o, backwards[n]->d_o)) return &backwards[n]->pass;
    }
    return nullptr;
  }
};

// Memory of this thread for one pass at a time, where a CPU runs it: fresh pages cost more than a small kernel.
char* spare(int64_t size) {
  struct Freed {
    void operator()(char* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<char, Freed> memory;
  thread_local int64_t bytes = 0;
  if (bytes < size) {
    int64_t whole = (size + 4095) / 4096 * 4096;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(whole))));
    bytes = memory ? whole : 0;
    TORCH_CHECK(memory, "no memory for a workspace of ", whole, " bytes");
  }
  return memory.get();
}

void check(int error, const char* what) {
  TORCH_CHECK(error == 0, "CUDA error ", error, " ", what);
}

void write(const Map& map, const Driver& driver, const Pointers& at, char* words) {
  uint32_t rank = static_cast<uint32_t>(map.extents.size());
  check(driver.encode(words, map.element, rank, const_cast<void*>(at[map.slot]), map.extents.data(), map.strides.data(),
                      map.box.data(), map.ones.data(), 0, map.swizzle, 2, 0),
        "where a tensor was described to tensor copies");
  std::memset(words + MAP_WORDS, 0, MAP_BYTES - MAP_WORDS);
  std::memcpy(words + MAP_WORDS, map.slabs, sizeof map.slabs);
}

void run(const Plan& plan, const Pass& pass, Pointers& at, const Numbers& numbers, const at::Tensor& like) {
  alignas(64) char arguments[MOST_BYTES];
  at::Tensor workspace;
  if (pass.workspace_bytes > 0) {
    if (pass.function != nullptr && pass.workspace_bytes <= SPARE_BYTES) {
      at[WORKSPACE] = spare(pass.workspace_bytes);
    } else {
      workspace = at::empty({pass.workspace_bytes}, like.options().dtype(at::kByte));
      at[WORKSPACE] = workspace.const_data_ptr();
    }
  }
  std::memcpy(arguments, pass.arguments.data(), pass.arguments.size());
  for (size_t slot = 0; slot < SLOTS; ++slot) std::memcpy(arguments + pass.offsets[slot], &at[slot], sizeof(void*));
  for (size_t n = 0; n < numbers.size(); ++n) std::memcpy(arguments + plan.places[n], numbers[n].const_data_ptr(), 4);
  if (pass.function != nullptr) {
    pass.function(arguments);
    return;
  }
  c10::DeviceGuard guard(like.device());
  void* stream = nullptr;
  check(plan.driver.stream(like.device().index(), &stream), "where the current stream was asked for");
  auto begin = reinterpret_cast<unsigned long long>(at[WORKSPACE]);
  for (const Clear& each : pass.clears) {
    unsigned long long place = begin + static_cast<unsigned long long>(each.offset);
    check(plan.driver.clear(place, 0, static_cast<size_t>(each.size), stream), "where memory was cleared");
  }
  alignas(64) char maps[MOST_MAPS * MAP_BYTES];
  for (const Launch& each : pass.launches) {
    for (size_t n = 0; n < each.maps.size(); ++n) write(each.maps[n], plan.driver, at, maps + n * MAP_BYTES);
    void* parameters[] = {arguments, maps};
    check(plan.driver.launch(each.function, each.grid, 1, 1, each.threads, 1, 1, each.shared_bytes, stream, parameters,
                             nullptr),
          "where a kernel was started");
  }
}

// o, and its rows: all that gradients need, or what the kernel writes in any case.
std::pair<at::Tensor, at::Tensor> attend(const Plan& plan, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const Numbers& numbers, bool keeps_rows) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor o = plan.o.empty(q), rows;
  Pointers at{};
  at[Q] = q.const_data_ptr(), at[K] = k.const_data_ptr(), at[V] = v.const_data_ptr();
  at[O] = o.const_data_ptr();
  if (plan.has_lse && (keeps_rows || plan.forward.function == nullptr)) {
    int64_t lse_at = keeps_rows ? plan.lse_at : 0;
    rows = at::empty({lse_at + plan.rows}, q.options().dtype(at::kFloat));
    const float* begin = rows.const_data_ptr<float>();
    at[PARTS] = keeps_rows ? begin : nullptr, at[LSE] = begin + lse_at;
  }
  run(plan, plan.forward, at, numbers, q);
  return {o, rows};
}

struct FlashgenAttention : torch::autograd::Function<FlashgenAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, int64_t address, const Numbers& numbers) {
    const Plan& plan = *reinterpret_cast<const Plan*>(address);
    auto [o, rows] = attend(plan, q, k, v, numbers, true);
    context->set_materialize_grads(false);
    context->saved_data["plan"] = address;
    torch::autograd::variable_list kept{q, k, v};
    kept.insert(kept.end(), numbers.begin(), numbers.end());
    if (plan.has_lse) kept.insert(kept.end(), {o, rows});
    context->save_for_backward(std::move(kept));
    return o;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list arriving) {
    const at::Tensor& d_o = arriving[0];
    torch::autograd::variable_list found(INPUTS);
    if (!d_o.defined()) return found;
    const Plan& plan = *reinterpret_cast<const Plan*>(context->saved_data["plan"].toInt());
    torch::autograd::variable_list saved = context->get_saved_variables();
    bool needs[3];
    for (size_t n = 0; n < 3; ++n) needs[n] = context->needs_input_grad(n);
    const Pass* pass = fits(plan, saved) ? plan.backward(d_o) : nullptr;
    if (pass == nullptr) return in_python(plan, d_o, saved, needs);
    at::AutoDispatchBelowADInplaceOrView below;
    Pointers at{};
    for (size_t n = 0; n < 3; ++n) {
      at[Q + n] = saved[n].const_data_ptr();
      found[n] = plan.gradients[n].empty(saved[n]);  // kernels write all three, asked for or not
      at[DQ + n] = found[n].const_data_ptr();
    }
    at[D_O] = d_o.const_data_ptr();
    size_t end = 3 + plan.places.size();
    if (plan.has_lse) {
      const float* begin = saved[end + 1].const_data_ptr<float>();
      at[O] = saved[end].const_data_ptr(), at[PARTS] = begin, at[LSE] = begin + plan.lse_at;
    }
    run(plan, *pass, at, Numbers(saved.begin() + 3, saved.begin() + static_cast<ptrdiff_t>(end)), saved[0]);
    for (size_t n = 0; n < 3; ++n) {
      if (!needs[n]) found[n] = at::Tensor();
    }
    return found;
  }

 private:
  static constexpr size_t INPUTS = 5;  // of `forward`, of which the first three have gradients

  // Whether nothing watches, and all is as when the plan was made: hooks may have given back other tensors than were
  // saved.
  static bool fits(const Plan& plan, const torch::autograd::variable_list& saved) {
    auto watching = c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set;
    if (c10::GradMode::is_enabled() || !watching.empty() || !plan.is_of_here()) return false;
    for (size_t n = 0; n < 3; ++n) {
      if (!plan.takes(saved[n], plan.operands[n])) return false;
    }
    size_t end = 3 + plan.places.size();
    for (size_t n = 3; n < end; ++n) {
      if (!plan.takes_number(saved[n], n - 3)) return false;
    }
    if (!plan.has_lse) return true;
    const at::Tensor &o = saved[end], &rows = saved[end + 1];
    return plan.takes(o, plan.o) && rows.is_contiguous() && rows.key_set() == plan.keys &&
           rows.scalar_type() == at::kFloat && rows.numel() == plan.lse_at + plan.rows;
  }

  static torch::autograd::variable_list in_python(const Plan& plan, const at::Tensor& d_o,
                                                  const torch::autograd::variable_list& saved, const bool* needs) {
    pybind11::gil_scoped_acquire lock;
    THPObjectPtr given(PyTuple_New(static_cast<Py_ssize_t>(saved.size()) + 4));
    if (!given) fail();
    PyTuple_SET_ITEM(given.get(), 0, THPVariable_Wrap(d_o));
    for (size_t n = 0; n < 3; ++n) PyTuple_SET_ITEM(given.get(), 1 + n, PyBool_FromLong(needs[n]));
    for (size_t n = 0; n < saved.size(); ++n) PyTuple_SET_ITEM(given.get(), 4 + n, THPVariable_Wrap(saved[n]));
    THPObjectPtr result(PyObject_CallObject(plan.slow, given.get()));
    if (!result) fail();
    torch::autograd::variable_list found(INPUTS);
    for (Py_ssize_t n = 0; n < 3; ++n) {
      PyObject* each = PyTuple_GetItem(result.get(), n);
      if (each == nullptr) fail();
      if (each != Py_None) found[n] = THPVariable_Unpack(each);
    }
    return found;
  }

  [[noreturn]] static void fail() {
    python_error error;
    error.persist();
    throw std::move(error);
  }
};

std::string bytes_of(PyObject* given) {
  char* begin;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(given, &begin, &size) != 0) throw python_error();
  return std::string(begin, static_cast<size_t>(size));
}

// plan(words, arguments of forward, slow, a plain tensor) -> its address, for ever
PyObject* make(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4 && THPVariable_Check(given[3]), "plan() takes four arguments");
  std::string bytes = bytes_of(given[0]);
  Words words(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  return PyLong_FromVoidPtr(new Plan(words, bytes_of(given[1]), given[2], THPVariable_Unpack(given[3])));
  END_HANDLE_TH_ERRORS
}

// add(plan, words, arguments of backward) -> whether there was room for it
PyObject* add(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "add() takes three arguments");
  auto* plan = static_cast<Plan*>(PyLong_AsVoidPtr(given[0]));
  if (plan == nullptr) return nullptr;
  std::string bytes = bytes_of(given[1]);
  Words words(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  size_t known = plan->known.load(std::memory_order_relaxed);
  if (known == MOST_BACKWARDS) Py_RETURN_FALSE;
  plan->backwards[known] = std::make_unique<const Backward>(words, bytes_of(given[2]));
  plan->known.store(known + 1, std::memory_order_release);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// attend(plan, q, k, v, *params) -> o, or None where the plan does not take them as they are
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count >= 4, "attend() takes four arguments and params");
  auto* plan = static_cast<const Plan*>(PyLong_AsVoidPtr(given[0]));
  if (plan == nullptr) return nullptr;
  size_t params = static_cast<size_t>(count) - 4;
  if (!plan->is_of_here() || params != plan->places.size()) Py_RETURN_NONE;
  for (Py_ssize_t n = 1; n < count; ++n) {
    if (!THPVariable_Check(given[n])) Py_RETURN_NONE;
  }
  for (size_t n = 0; n < 3; ++n) {
    if (!plan->takes(THPVariable_Unpack(given[n + 1]), plan->operands[n])) Py_RETURN_NONE;
  }
  Numbers numbers;
  numbers.reserve(params);
  for (size_t n = 0; n < params; ++n) {
    numbers.push_back(THPVariable_Unpack(given[n + 4]));
    if (!plan->takes_number(numbers.back(), n)) Py_RETURN_NONE;
  }
  at::Tensor q = THPVariable_Unpack(given[1]), k = THPVariable_Unpack(given[2]), v = THPVariable_Unpack(given[3]), o;
  {
    pybind11::gil_scoped_release others_run;
    bool learns = c10::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
    o = learns ? FlashgenAttention::apply(q, k, v, static_cast<int64_t>(reinterpret_cast<intptr_t>(plan)),
                                        numbers)
               : attend(*plan, q, k, v, numbers, false).first;
  }
  return THPVariable_Wrap(std::move(o));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make)), METH_FASTCALL, nullptr},
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL, nullptr},
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "flashgen_node", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_flashgen_node() { return PyModule_Create(&module); }
