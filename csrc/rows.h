// What is done once for each row, around the kernels: from the numbers that they leave to what a caller keeps, and from
// what comes in to what a backward knows of a row. The sink lives here alone: no kernel sees it.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "border.h"

namespace attnscore {

// Around a forward: a place for the kernels' numbers of each row. After it `finish` makes of them top and
// log_total = log sum exp(s - top), the sink among the s (-inf where a row sees nothing), and the statistics that are
// wanted; `out` becomes the share of the keys.
class ForwardRows {
   public:
    ForwardRows(Problem& problem, const std::vector<HeadRows>& rows);
    void finish(int threads) const;

   private:
    const Problem& problem_;
    const std::vector<HeadRows>& rows_;
    std::unique_ptr<char[]> numbers_;
};

// Before a backward: log_total (+inf where nothing is seen) and shift of each row. Holds them until the backward is
// done.
class BackwardRows {
   public:
    BackwardRows(Problem& problem, const std::vector<HeadRows>& rows, int threads);

   private:
    std::vector<char> numbers_;
};

// After it: the sink is a logit without a value, so its dp is the shift alone.
void set_sink_gradients(const Problem& problem, const std::vector<HeadRows>& rows);

}  // namespace attnscore
