// The bytes of a burst, from its tags (the paper's tag decoder), and whether a value beyond the
// first `present` has a tag, which no encoder writes.
module gw_burst_size (
    input  logic [15:0] tags,
    input  logic [ 3:0] present,
    output logic [ 5:0] size,
    output logic        absent_tag
);
    always_comb begin
        size = 6'd2;
        absent_tag = 1'b0;
        for (int i = 0; i < 8; i++) begin
            size += tags[2*i+:2] == 2'd3 ? 6'd4 : {4'd0, tags[2*i+:2]};
            if (present <= i[3:0] && tags[2*i+:2] != 2'd0) absent_tag = 1'b1;
        end
    end
endmodule
