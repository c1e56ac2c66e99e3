// What is done once for each row, around the kernels: from the numbers that they leave to what a caller keeps, and from
// what comes in to what a backward knows of a row. The sink lives here alone: no kernel sees it.
#pragma once

#include <memory>
#include <vector>

#include "api/validate.h"
#include "runtime/attention.h"

namespace attnscore {

// Around a forward: a place for the kernels' numbers of each row. After it `finish` makes of them row_max and
// log_denom = log sum exp(s - row_max), the sink among the s (-inf where a row sees nothing), and the statistics that
// are wanted; `out` becomes the share of the keys.
class ForwardRowFinish {
   public:
    ForwardRowFinish(Problem& problem, const std::vector<RowArrays>& rows);
    void finish(int threads) const;

   private:
    const Problem& problem_;
    const std::vector<RowArrays>& rows_;
    std::unique_ptr<char[]> row_stats_;
};

// Before a backward: log_denom (+inf where nothing is seen) and delta of each row. Holds them until the backward is
// done.
class BackwardRowPrepare {
   public:
    BackwardRowPrepare(Problem& problem, const std::vector<RowArrays>& rows, int threads);

   private:
    std::vector<char> row_stats_;
};

// After it: the sink is a logit without a value, so its dp is the delta alone.
void set_sink_gradients(const Problem& problem, const std::vector<RowArrays>& rows);

}  // namespace attnscore
