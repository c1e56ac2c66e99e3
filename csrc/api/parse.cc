#include "api/parse.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace attnscore {
namespace {

std::atomic<const Kernels*> selected{nullptr};

// "'a', 'b'", from the names of items.
template <class Items, class Name>
std::string quoted_names(const Items& items, const Name& name_of) {
    std::string names;
    for (const auto& item : items) names += (names.empty() ? "'" : ", '") + std::string(name_of(item)) + "'";
    return names;
}

const Kernels* find_kernels(std::string_view name, const std::string& argument) {
    const std::vector<const Kernels*> runnable = runnable_kernels();
    for (const Kernels* k : runnable) {
        if (name == k->name) return k;
    }
    throw std::invalid_argument(argument + ": expected a target that this CPU runs, one of " +
                                quoted_names(runnable, [](const Kernels* k) { return k->name; }) + ", got '" +
                                std::string(name) + "'");
}

template <class T>
using Choice = std::pair<std::string_view, T>;

constexpr Choice<Dtype> kDtypes[] = {
    {"float32", Dtype::f32}, {"float64", Dtype::f64}, {"bfloat16", Dtype::bf16}, {"float16", Dtype::f16}};
constexpr Choice<Form> kForms[] = {{"inner", Form::inner}, {"additive", Form::additive}, {"distance", Form::distance}};
constexpr Choice<Activation> kActivations[] = {{"tanh", Activation::tanh}, {"sigmoid", Activation::sigmoid},
                                               {"relu", Activation::relu}, {"leaky_relu", Activation::leaky_relu},
                                               {"silu", Activation::silu}, {"gelu", Activation::gelu}};

template <class T, size_t N>
T parse_choice(const Choice<T> (&choices)[N], std::string_view name, const char* argument) {
    for (const auto& [text, value] : choices) {
        if (text == name) return value;
    }
    throw std::invalid_argument(std::string(argument) + ": expected one of " +
                                quoted_names(choices, [](const Choice<T>& x) { return x.first; }) + ", got '" +
                                std::string(name) + "'");
}

}  // namespace

// The variable is read at the first use, not at import, which a wrong value would make fail.
const Kernels& selected_kernels() {
    const Kernels* kernels = selected.load(std::memory_order_acquire);
    if (kernels == nullptr) {
        const char* name = std::getenv("ATTNSCORE_TARGET");
        kernels = name != nullptr && *name != '\0' ? find_kernels(name, "environment variable ATTNSCORE_TARGET")
                                                   : runnable_kernels().front();
        selected.store(kernels, std::memory_order_release);
    }
    return *kernels;
}

void select_kernels(std::string_view name) { selected.store(find_kernels(name, "name"), std::memory_order_release); }

Dtype parse_dtype(std::string_view name, const char* argument) { return parse_choice(kDtypes, name, argument); }

std::string_view dtype_name(Dtype dtype) {
    for (const auto& [name, value] : kDtypes) {
        if (value == dtype) return name;
    }
    return "";
}

Problem parse_problem(const ScoreSpec& spec) {
    const auto& [form, activation, negative_slope, scale, caps, score_dtype, value_dtype, bias_dtype, dropout,
                 first_row, all_rows, seed] = spec;
    Problem p;
    p.form = parse_choice(kForms, form, "form");
    p.activation = parse_choice(kActivations, activation, "activation");
    p.negative_slope = negative_slope;
    p.scale = scale;
    for (const auto& [cap, factor] : caps) {
        if (!(cap > 0)) throw std::invalid_argument("caps: expected caps above 0, got " + std::to_string(cap));
        p.caps.push_back({cap, factor});
    }
    p.score_dtype = parse_choice(kDtypes, score_dtype, "score_dtype");
    p.value_dtype = parse_choice(kDtypes, value_dtype, "value_dtype");
    p.bias_dtype = parse_choice(kDtypes, bias_dtype, "bias_dtype");
    if (p.value_dtype == Dtype::f64 && p.score_dtype != Dtype::f64) {
        throw std::invalid_argument("value_dtype: float64 needs score_dtype float64, got '" + std::string(score_dtype) +
                                    "'");
    }
    if (!(dropout >= 0 && dropout < 1)) {
        throw std::invalid_argument("dropout: expected a number in [0, 1), got " + std::to_string(dropout));
    }
    p.dropout = dropout;
    p.first_row = first_row;
    p.all_rows = all_rows;
    p.seed = seed;
    return p;
}

}  // namespace attnscore
