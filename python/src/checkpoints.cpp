// Long calls on whole checkpoints, with progress and Ctrl-C.
#include <fmt/format.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "gatefold/calibrate.h"
#include "module.h"
#include "plans.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

/// Work in a thread of its own, so that the caller's can look after signals and call back into Python.
class Background {
 public:
  /// `work` may ask cancelled() and tell progress() from any of its threads.
  template <class T>
  T run(const std::function<Result<T>(Background&)>& work, const nb::object& callback) {
    std::optional<Result<T>> result;
    const nb::gil_scoped_release release;
    std::thread thread([&] {
      try {
        result.emplace(work(*this));
      } catch (const std::exception& error) {  // out of memory
        result.emplace(Status(Code::io_error, error.what()));
      }
      const std::lock_guard lock(mutex_);
      finished_ = true;
      changed_.notify_all();
    });
    std::exception_ptr raised;
    std::unique_lock lock(mutex_);
    while (!finished_) {
      changed_.wait_for(lock, std::chrono::milliseconds(100));
      if (raised) continue;
      lock.unlock();
      try {
        const nb::gil_scoped_acquire acquire;
        check_signals();
        tell(callback);
      } catch (...) {
        raised = std::current_exception();
        cancelled_ = true;
      }
      lock.lock();
    }
    lock.unlock();
    thread.join();
    if (raised) std::rethrow_exception(raised);
    const nb::gil_scoped_acquire acquire;
    T report = value(std::move(*result));
    tell(callback);
    return report;
  }

  bool cancelled() const { return cancelled_; }
  void progress(std::uint64_t done, std::uint64_t total) {
    total_ = total;
    done_ = done;
  }

 private:
  void tell(const nb::object& callback) {
    const std::uint64_t done = done_, total = total_;
    if (callback.is_none() || total == 0 || done == told_) return;
    told_ = done;
    callback(done, total);
  }

  std::atomic<bool> cancelled_{false};
  std::atomic<std::uint64_t> done_{0}, total_{0};
  std::uint64_t told_ = ~std::uint64_t{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool finished_ = false;
};

Result<ConvertReport> convert_all(const std::string& source, const std::string& destination, SchemeId scheme,
                                  bool scale_search, int threads, Background& background) {
  const auto checkpoint = Checkpoint::open(source);
  if (!checkpoint) return checkpoint.status();
  ConvertOptions options{.scheme = scheme, .quantize = {.scale_search = scale_search}, .threads = threads};
  options.cancelled = [&] { return background.cancelled(); };
  return convert(*checkpoint, destination, options,
                 [&](const ConvertProgress& p) { background.progress(p.done_bytes, p.total_bytes); });
}

Result<ConvertReport> calibrate_all(const std::string& source, const std::string& destination,
                                    SchemeId scheme, Method method, const std::vector<std::int32_t>& tokens,
                                    int threads, Background& background) {
  const auto checkpoint = Checkpoint::open(source);
  if (!checkpoint) return checkpoint.status();
  CalibrateOptions options{.scheme = scheme, .method = method, .threads = threads};
  options.cancelled = [&] { return background.cancelled(); };
  options.progress = [&](std::int64_t done, std::int64_t total) {
    background.progress(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
  };
  auto report = calibrate(*checkpoint, destination, tokens, options);
  if (!report) return report.status();
  report->written.seconds = report->seconds;
  return report->written;
}

}  // namespace

void add_checkpoints(nb::module_& m) {
  nb::class_<ConvertReport>(m, "ConvertReport", "What quantize_checkpoint wrote.")
      .def_ro("source_bytes", &ConvertReport::source_bytes)
      .def_ro("written_bytes", &ConvertReport::written_bytes)
      .def_ro("shards", &ConvertReport::shards)
      .def_ro("seconds", &ConvertReport::seconds);
  m.def(
      "quantize_checkpoint",
      [](const std::string& source, const std::string& destination, const std::string& scheme_name,
         const std::string& method, std::optional<std::vector<std::int32_t>> tokens, bool scale_search,
         int threads, nb::object progress) {
        use_threads();
        const SchemeId id = to_scheme(scheme_name);
        std::optional<Method> how;
        if (method != "rtn") {
          how = find_method(method);
          if (!how)
            invalid(fmt::format("method = '{}', expected 'rtn', 'gptq', 'awq' or 'smoothquant'", method));
          if (!tokens) invalid(fmt::format("method '{}' needs tokens", method));
        }
        Background background;
        const auto work = [&](Background& b) {
          return how ? calibrate_all(source, destination, id, *how, *tokens, threads, b)
                     : convert_all(source, destination, id, scale_search, threads, b);
        };
        return background.run<ConvertReport>(work, progress);
      },
      "source"_a, "destination"_a, "scheme"_a, nb::kw_only(), "method"_a = "rtn", "tokens"_a = nb::none(),
      "scale_search"_a = false, "threads"_a = 0, "progress"_a = nb::none(),
      "Quantizes the routed experts of the checkpoint in directory `source` into the new directory "
      "`destination`. "
      "method 'gptq', 'awq' and 'smoothquant' calibrate on token ids. progress(done, total) is called in "
      "this thread, "
      "at most ten times a second; what it raises, and Ctrl-C, stop the work, and nothing is left behind (of "
      "a "
      "calibration: the layers that are done). Raises BadFile, IoError, InvalidArgument, Unsupported.");
}

}  // namespace gatefold::python
